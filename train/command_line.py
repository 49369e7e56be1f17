"""How every program here starts and fails: `run(main)` at the end of the file.

`--help` prints the module docstring and the flags. What a user can get wrong (a flag, a config field, a file, a value)
ends with one line on stderr and exit code 2; a traceback is left for what only a programmer can get wrong.
"""

import inspect
import pathlib
import sys
import traceback

from absl import app, flags, logging

import dspark_jax
from dspark_jax.data.assets import AssetError

_OURS = [pathlib.Path(module).resolve().parent for module in (dspark_jax.__file__, __file__)]
_OURS.append(_OURS[-1].with_name("experiments"))


def run(main) -> None:
    """Parses the flags of sys.argv, calls main with the arguments that are no flags, one for each of its parameters,
    and exits.

    Exit codes: 0; 2 with "error: ..." for bad input; 130 when interrupted from the keyboard.
    """
    if any(argument in ("-h", "-help", "--help") for argument in sys.argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.exit(0)
    try:
        app.run(lambda argv: main(*_arguments(main, argv[1:])), flags_parser=_parse)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not is_bad_input(error):
            raise
        _fail(error)


def _arguments(main, found):
    names = list(inspect.signature(main).parameters)
    if len(found) > len(names):
        raise ValueError(f"argument {found[len(names)]!r} is not a flag; see --help")
    if len(found) < len(names):
        raise ValueError(f"argument {names[len(found)]!r} is missing; see --help")
    return found


def _parse(argv):
    try:
        rest = flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:
        # What ml_collections raises for an override of a field that is not there.
        inner = error.args[0] if error.args else error
        text = inner.args[0] if isinstance(inner, KeyError) and inner.args else inner
        _fail(f"config override: no field {text}; allowed: {', '.join(_config_fields(argv))}")
    except (flags.Error, TypeError, ValueError, OSError) as error:
        _fail(error)
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # jax's notes on backends that are not there only worry people
    return rest


def _config_fields(argv):
    """Dotted names of all fields of the file that --config names."""
    for argument, following in zip(argv, [*argv[1:], ""]):
        name, _, path = argument.lstrip("-").partition("=")
        if name == "config":
            return _names(flags.FLAGS["config"].parser.parse(path or following), "config")
    return []


def _names(value, prefix):
    if not hasattr(value, "items"):
        return [prefix]
    return [name for key, inner in value.items() for name in _names(inner, f"{prefix}.{key}")]


def whole_numbers(flag) -> list[int]:
    """The values of a list flag without repetitions. Raises ValueError unless all are whole numbers of at least 1."""
    if not flag.value or not all(text.isascii() and text.isdigit() and int(text) for text in flag.value):
        raise ValueError(f"--{flag.name}={','.join(flag.value)}: allowed: whole numbers of at least 1, such as 1,8")
    return list(dict.fromkeys(map(int, flag.value)))


def is_bad_input(error: Exception) -> bool:
    """Whether a program ends with one line and exit code 2 where this is raised, rather than with a traceback."""
    if isinstance(error, (AssetError, OSError)):
        return True
    # A ValueError that our own code raises is about the input; one from inside a library is a bug of ours.
    where = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, ValueError) and any(where.is_relative_to(folder) for folder in _OURS)


def _fail(error):
    if isinstance(error, OSError) and error.filename is not None:
        error = f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any(line.startswith("Traceback") for line in lines):  # a config file that raised: what it was, and what it said
        lines = [lines[0], lines[-1]]
    print("error:", " ".join(lines), file=sys.stderr)
    sys.exit(2)
