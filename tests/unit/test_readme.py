"""What a reader copies from README.md into a shell, run."""

import contextlib
import io
import re
from pathlib import Path

from kvatlas.router.http.bodies.decoding import decode_score_request
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import Fleet

README = Path(__file__).parents[2] / "README.md"


def body_of_the_example() -> bytes:
    """Return what the command that names blocks pipes into curl."""
    [program] = re.findall(
        r'^\.venv/bin/python -c "\n((?:(?!```).)*?block_hashes.*?)\n" \| curl',
        README.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    return printed.getvalue().encode()


def test_the_hashes_of_the_readme_name_what_a_worker_holds() -> None:
    asked = decode_score_request(body_of_the_example(), "application/json", RouterSettings())
    assert asked.hashed is not None
    assert asked.hashed.num_tokens == 20
    fleet = Fleet()
    fleet.up("w0", model="reference")
    fleet.holds("w0", range(1, 21))
    [score] = fleet.router().score(asked).candidates
    assert score.match_tokens == 16
