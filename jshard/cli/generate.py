"""`jshard generate`: text from a model trained by `jshard train`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jshard.cli.resume import found
from jshard.cli.target import Target
from jshard.errors import JShardError
from jshard.launch.cluster_env import found as membership

if TYPE_CHECKING:
    from jshard.training.data.tokens import Tokenizer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jshard generate [-h] RUN --prompt TEXT [--prompt TEXT ...] [key=value ...] [--trust]"
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="the text to continue; several are one batch")
    parser.add_argument(
        "--tokens", type=int, default=100, metavar="N", help="the most tokens to add to each; default: 100"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="how freely to draw tokens; default: 0, the likeliest",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens with a total probability of P"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end after this text")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of the draws; default: 0")
    parser.add_argument(
        "--from", dest="which", default="latest", metavar="STEP", help="latest, previous or the number of a step"
    )
    parser.set_defaults(needs=("the folder of a run", 'runs/mine --prompt "Once"'))


def run(chosen: argparse.Namespace) -> int:
    if not chosen.prompt:
        hint = f'type: jshard generate {chosen.path} --prompt "Once"'
        raise JShardError("jshard generate needs a prompt", hint=hint)
    if "" in chosen.stop:
        raise JShardError('--stop "" is empty', hint="remove it")
    folder, own, which = found(Path(chosen.path), chosen.which)
    configuration = Target.named(str(own), chosen.overrides, chosen).configuration()
    if membership() is None:
        from jshard.cli.experiment import pretend_where_none

        pretend_where_none(configuration)
    else:
        from jshard.cli.rank_main import join

        facts = {name: str(value) for name, value in vars(chosen).items() if name not in ("command", "path")}
        join(configuration, {"command": facts})
    import jax

    from jshard.layouts.mesh import present_mesh
    from jshard.signals import active_config
    from jshard.training.checkpoints.checkpoint import Checkpoint
    from jshard.training.data.tokens import tokenizer
    from jshard.training.generation import generate, trained_model
    from jshard.training.settings import Settings

    active_config.use(configuration)
    words = tokenizer(Settings(configuration))
    prompts = [each.tolist() for each in words.encode(chosen.prompt)]
    stop = [int(each[0]) for each in words.encode(chosen.stop) if len(each) == 1]  # `end` may be a token without a text
    stop += [] if words.end is None else [words.end]
    checkpoint = Checkpoint.find(folder, which, chosen.path)
    made = generate(
        trained_model(configuration, present_mesh(), checkpoint), prompts, tokens=chosen.tokens, stop=stop, seed=chosen.seed,
        temperature=chosen.temperature, top_k=chosen.top_k, top_p=chosen.top_p,
    )  # fmt: skip
    pieces = streamed(words, chosen.prompt, made, chosen.stop)
    if membership() is not None:  # process 0 prints, and its launcher reads whole lines
        whole = "".join(pieces)
        pieces = iter([whole] if jax.process_index() == 0 else [])
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    return 0


def streamed(
    words: Tokenizer, prompts: Sequence[str], made: Iterator[list[int | None]], stop: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the first prompt's text as it is made, then the others; each ends after the first text of `stop`."""
    tokens: list[list[int]] = [[] for _ in prompts]

    def text(row: list[int]) -> str:
        text = words.decode(row)
        return text[: min((text.index(each) + len(each) for each in stop if each in text), default=None)]

    yield prompts[0]
    said = ""
    for step in made:
        for row, token in zip(tokens, step, strict=True):
            row += [] if token is None else [token]
        texts = [text(row) for row in (tokens if stop else tokens[:1])]
        if texts[0].startswith(said) and not texts[0].endswith("\ufffd"):  # a letter may be several tokens
            yield texts[0][len(said) :]
            said = texts[0]
        if stop and all(token is None or each.endswith(tuple(stop)) for token, each in zip(step, texts, strict=True)):
            break
    yield f"{text(tokens[0])[len(said) :]}\n"
    for prompt, row in zip(prompts[1:], tokens[1:], strict=True):
        yield f"\n{prompt}{text(row)}\n"
