"""`jshard generate`: text from a model that `jshard train` has trained."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jshard.cli.resume import found
from jshard.cli.target import find_modules_here
from jshard.errors import JShardError, quoted
from jshard.signals.config import load_configuration

if TYPE_CHECKING:
    from jshard.training.tokens import Tokenizer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard generate [-h] RUN --prompt TEXT [--prompt TEXT ...] [key=value ...]"
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="what to go on from; several are one batch")
    parser.add_argument(
        "--tokens", type=int, default=100, metavar="N", help="at most so many more of each; 100 unless said"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="how freely tokens are drawn; 0, the likeliest, unless said",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw of the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw of the likeliest tokens that have P of the probability"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a token to end behind")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another one draws other tokens; 0 unless said"
    )
    parser.add_argument(
        "--from", dest="which", default="latest", metavar="STEP", help="latest, previous or the number of a step"
    )
    parser.set_defaults(needs=("the folder of a run", 'runs/mine --prompt "Once"'))


def run(chosen: argparse.Namespace) -> int:
    if not chosen.prompt:
        hint = f'type: jshard generate {chosen.path} --prompt "Once"'
        raise JShardError("jshard generate needs a prompt to go on from", hint=hint)
    folder, own, which = found(Path(chosen.path), chosen.which)
    find_modules_here()
    from jshard.cli.experiment import pretend_where_none
    from jshard.layouts.mesh import present_mesh
    from jshard.signals import active_config
    from jshard.training.checkpoint import Checkpoint
    from jshard.training.generation import generate, trained_model
    from jshard.training.settings import Settings
    from jshard.training.tokens import tokenizer

    pretend_where_none(load_configuration(own, chosen.overrides))
    configuration = active_config.load(own, chosen.overrides)
    words = tokenizer(Settings(configuration))
    prompts = [each.tolist() for each in words.encode(chosen.prompt)]
    stop = [_token(words, each) for each in chosen.stop] + ([] if words.end is None else [words.end])
    checkpoint = Checkpoint.find(folder, which, chosen.path)
    made = generate(
        trained_model(configuration, present_mesh(), checkpoint), prompts, tokens=chosen.tokens, stop=stop, seed=chosen.seed,
        temperature=chosen.temperature, top_k=chosen.top_k, top_p=chosen.top_p,
    )  # fmt: skip
    for piece in streamed(words, chosen.prompt, made):
        sys.stdout.write(piece)
        sys.stdout.flush()
    return 0


def streamed(words: Tokenizer, prompts: Sequence[str], made: Iterator[list[int | None]]) -> Iterator[str]:
    """Yield the text of the first prompt as it is made, and the others whole behind it."""
    tokens: list[list[int]] = [[] for _ in prompts]
    yield prompts[0]
    said = ""
    for step in made:
        for row, token in zip(tokens, step, strict=True):
            row += [] if token is None else [token]
        text = words.decode(tokens[0])
        if text.startswith(said) and not text.endswith("\ufffd"):  # a letter may be several tokens
            yield text[len(said) :]
            said = text
    yield f"{words.decode(tokens[0])[len(said) :]}\n"
    for prompt, row in zip(prompts[1:], tokens[1:], strict=True):
        yield f"\n{prompt}{words.decode(row)}\n"


def _token(words: Tokenizer, text: str) -> int:
    (tokens,) = words.encode([text])
    if len(tokens) != 1:
        raise JShardError(f"--stop {quoted(text)} is {len(tokens)} tokens", hint="give it the text of one token")
    return int(tokens[0])
