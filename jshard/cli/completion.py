"""`jshard completion`: a script for completion at Tab. It calls jshard, and so is never outdated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

SCRIPTS = {
    "bash": r"""
_jshard() { local IFS=$'\n'; COMPREPLY=($(jshard completion bash "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)); }
complete -o default -F _jshard jshard
""",
    "zsh": r"""
_jshard() {
  local -a found; found=(${(f)"$(jshard completion zsh "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _jshard jshard
""",
    "fish": r"""
complete -c jshard -a '(jshard completion fish (commandline -opc)[2..] "$(commandline -ct)" 2>/dev/null)'
""",
}
EPILOG = 'In ~/.bashrc or ~/.zshrc: eval "$(jshard completion bash)", or zsh; in config.fish: jshard completion fish | source.'


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SCRIPTS, help="the shell of the script")


def run(chosen: argparse.Namespace) -> int:
    """Print the script of a shell, or the completions of the words after it."""
    found = complete(chosen.parser, chosen.words) if chosen.words else [SCRIPTS[chosen.shell].strip()]
    print("\n".join(found))
    return 0


def complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return completions of the last word, or nothing if it is a file: the shell completes files."""
    *before, last = words
    actions = parser._actions
    for action in actions:
        if isinstance(action, argparse._SubParsersAction) and before:
            chosen = action.choices.get(before[0])
            return complete(chosen, [*before[1:], last]) if chosen is not None else []
    options = {option: action for action in actions for option in action.option_strings}
    option = options.get(before[-1]) if before else None
    if option is not None and option.nargs != 0:
        found = option.choices or ()
    elif last.startswith("-"):
        found = options
    else:
        positional = [action for action in actions if not action.option_strings]
        offered = [action.choices for action in positional if action.choices and not before]
        named = [getattr(action, "completes", None) for action in positional]
        found = next(filter(None, [*named, *offered]), ())
    return sorted(str(word) for word in found if str(word).startswith(last))
