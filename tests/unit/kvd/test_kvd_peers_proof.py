"""What a daemon signs for another, and what it takes for proof."""

import pytest

from pdserve.kvd.peers import proof
from pdserve.kvd.peers.codec import encode_greeting
from pdserve.kvd.peers.messages import Greeting
from pdserve.rpc.errors import InvalidRequest, TicketForged
from pdserve.runtime.signing import Kind, Signer

SIGNER = Signer(b"the key of this cluster")
ME = Greeting("epoch", "1", 1, "node", "node:1", "boot", 5, 6)


def test_a_greeting_over_the_others_nonce_is_proof() -> None:
    """It brings the nonce for the answer; under another nonce it is another stream's."""
    theirs, ours = proof.new_nonce(), proof.new_nonce()
    signed = proof.sign(SIGNER, ME, theirs, ours)
    assert proof.check(SIGNER, signed, theirs) == (ME, ours)
    with pytest.raises(TicketForged, match="another stream"):
        proof.check(SIGNER, signed, proof.new_nonce())


def test_no_stranger_has_words_of_his_own_signed() -> None:
    """Whoever is called gives the nonce before he has proved anything. A greeting of his own behind it, with the real
    one as a field that nobody knows, would be taken for a member's."""
    nonce = proof.new_nonce()
    his = encode_greeting(Greeting("his epoch", "1", 1, "his", "his:1", "boot", 5, 6), proof.new_nonce())
    real = encode_greeting(ME, proof.new_nonce())
    hides = bytes([15 << 3 | 2, len(real)])  # field 15, of as many bytes
    forged, _ = proof.check(SIGNER, SIGNER.sign(Kind.HELLO, nonce + his + hides + real), nonce)
    assert forged.epoch == "his epoch", "that is what a longer nonce is worth"
    for given in (nonce + his + hides, nonce[:-1], b""):
        with pytest.raises(InvalidRequest, match="nonce"):
            proof.sign(SIGNER, ME, given, proof.new_nonce())
