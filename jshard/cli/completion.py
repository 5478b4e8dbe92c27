"""`jshard completion`: what a shell runs at Tab. It asks jshard itself, so that no list of commands can be old."""

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
    parser.add_argument("shell", choices=SCRIPTS, help="whose script to print")
    parser.set_defaults(words=[])  # typed so far, which the script puts behind the shell


def complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """What the last of the words may become; nothing where a file is wanted, which the shell knows better."""
    *before, last = words
    actions = parser._actions
    for action in actions:
        if isinstance(action, argparse._SubParsersAction) and before:
            chosen = action.choices.get(before[0])
            return complete(chosen, [*before[1:], last]) if chosen is not None else []
    options = {option: action for action in actions for option in action.option_strings}
    asked = options.get(before[-1]) if before else None
    if asked is not None and asked.nargs != 0:
        found = asked.choices or ()
    elif last.startswith("-"):
        found = options
    else:
        positional = [action.choices for action in actions if not action.option_strings and action.choices]
        found = positional[0] if positional and not before else ()
    return sorted(str(word) for word in found if str(word).startswith(last))
