"""The real model out of its package, on a real runtime that is not ours."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch, transformers
folder = sys.argv[1]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
torch.set_num_threads(1)
chat = [{"role": "user", "content": "What is the capital of France?"}]
rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
for prompt in ("The capital of France is", rendered):
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    print("ANSWER", tokenizer.decode(out[0, ids.shape[1]:]).replace("\\n", " "))
"""


def test_smollm2_knows_the_capital_of_france(tmp_path: Path) -> None:
    """The converted weights, tokenizer and chat template give sense under transformers: nothing is in a wrong order."""
    fetched = subprocess.run(
        [sys.executable, "-m", "pdserve.engine.vllm.fetch", "smollm2-135m", "--cache", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    folder = Path(fetched.stdout.splitlines()[-1])
    assert "converting" in fetched.stderr
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=50, check=True
    )
    answers = [line.removeprefix("ANSWER") for line in said.stdout.splitlines() if line.startswith("ANSWER")]
    assert len(answers) == 2
    assert all("Paris" in answer for answer in answers), answers
    assert answers[1].rstrip().endswith("<|im_end|>"), "the chat template does not lead to an end of turn"
