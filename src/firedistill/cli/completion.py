"""`firedistill completion bash|zsh|fish`: a script that completes commands, options, methods and recipes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from firedistill.cli.arguments import OF_COMMANDS, wants_help
from firedistill.cli.names import method_names, setting_types
from firedistill.coerce import built_in_names
from firedistill.imports import METHODS, plugins

BASH = """\
_firedistill() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
    if [ "$COMP_CWORD" = 1 ]; then COMPREPLY=($(compgen -W "COMMANDS" -- "$word"))
    elif [ "$before" = --method ]; then COMPREPLY=($(compgen -W "METHODS" -- "$word"))
    elif [[ $word == --* ]]; then COMPREPLY=($(compgen -W "OPTIONS" -- "$word"))
    else COMPREPLY=($(compgen -W "RECIPES" -- "$word") $(compgen -f -- "$word")); fi
}
complete -o filenames -F _firedistill firedistill
"""
FISH = """\
complete -c firedistill -n __fish_use_subcommand -f -a "COMMANDS"
complete -c firedistill -n "__fish_prev_arg_in --method" -f -a "METHODS"
complete -c firedistill -n "not __fish_use_subcommand" -a "RECIPES OPTIONS"
"""
SCRIPTS = {"bash": BASH, "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + BASH, "fish": FISH}


def completion_command(arguments: Sequence[str], console: Console) -> int:
    if wants_help(arguments):
        console.print('firedistill completion bash|zsh|fish\n\nPrints a script; in bash: eval "$(firedistill completion bash)"')
        return 0
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        raise ValueError(
            'expected the name of a shell, as in: eval "$(firedistill completion bash)"; known are bash, zsh and fish'
        )
    from firedistill.cli.main import COMMANDS

    options = {*setting_types()}.union(*OF_COMMANDS.values())
    words = {
        "COMMANDS": COMMANDS,
        "METHODS": [*method_names(), *plugins(METHODS)],
        "OPTIONS": [f"--{name}" for name in options],
        "RECIPES": built_in_names("recipes"),
    }
    script = SCRIPTS[arguments[0]]
    for name, known in words.items():
        script = script.replace(name, " ".join(sorted(known)))
    console.print(script, end="", soft_wrap=True)
    return 0
