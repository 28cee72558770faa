"""A question for batches again, while its answer comes."""

from msgspec import Struct


class ReplayRequest(Struct):
    """What is asked, and what the answer has shown so far."""

    number: int
    #: the batch that proves the incarnation; None asks for everything
    witness: int | None
    #: why it is another incarnation if it has lost the witness
    must_prove: str = ""
    #: whether the engine is known to be the one that said what came before
    is_proven: bool = False
    has_answer: bool = False
    num_delivered: int = 0
    #: batches are missing within the answer: the engine's socket has dropped them
    has_holes: bool = False
