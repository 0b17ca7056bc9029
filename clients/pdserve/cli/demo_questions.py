"""What the demo asks. Their first words differ, so that no prompt finds another's blocks in a prefix cache."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of the demo; a `system` makes it a chat."""

    name: str
    mode: Literal["read", "write"]
    text: str
    system: str = ""


_RIVER = (
    "A river begins where water finds a way down. High in the mountains the snow melts in spring, and "
    "thin streams run between the stones. They meet, they grow, and after some miles they have a name. In "
    "the valley the river is slow and wide; people have built mills, bridges and towns along it. Boats "
    "carry grain and timber to the coast. Every few years the river floods the fields and leaves behind "
    "the mud that makes them fertile. At the end it divides into many arms and reaches the sea. The most "
    "important thing that a river does for the people in its valley is"
)
_STORY = (
    "Once upon a time there was a small lighthouse on an island far from the coast. The keeper, an old "
    "woman called Ida, had lived there for forty years. Each evening she climbed the ninety steps, lit "
    "the lamp and wrote the weather into a book. One night, in the worst storm that she had ever seen, "
    "the lamp would not burn. Ships were near: she could hear their bells. Ida took the book, tore out "
    "the first page, and then the second, and fed them to a fire on the gallery, year after year of wind "
    "and rain. In the morning the storm was over, all ships were safe, and the book was"
)

QUESTIONS = (
    Question("short", "read", "The capital of France is"),
    Question("chat", "read", "Name three colours of the rainbow.", system="You answer in one short sentence."),
    Question("long", "read", _RIVER),
    Question("short", "write", "Water boils at a temperature of"),
    Question("chat", "write", "What is the tallest animal on land?", system="Be brief and friendly to children."),
    Question("long", "write", _STORY),
)
