"""Reading config.json field by field: every value is checked, and every complaint names the file and the field."""

import pathlib

from dspark_jax.checkpoints.safetensors_files import parse_json

REQUIRED = object()
LARGEST = 2**31 - 1  # of an integer field


class Fields:
    """The fields of a config file, looked up in one or more of its sections; the first section that has one wins.

    A field that is null counts as absent. Getters raise ValueError that names the file, the field, what was found and
    what is allowed; a field that is absent and has no default is an error too.
    """

    def __init__(self, path, sections: list[tuple[str, dict]]):
        self.path = path
        self._sections = sections

    @classmethod
    def read(cls, path) -> "Fields":
        """Of a JSON file. Raises FileNotFoundError, or ValueError for a file that is no JSON object."""
        path = pathlib.Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        data = parse_json(path.read_bytes(), path)
        if not isinstance(data, dict):
            raise ValueError(f"{path}: {type(data).__name__} found; must be a JSON object")
        return cls(path, [("", data)])

    def inside(self, name, required=True) -> "Fields":
        """The section ``name`` alone; without fields where it is absent and not ``required``."""
        where, section = self._find(name, REQUIRED if required else {})
        if not isinstance(section, dict):
            self._refuse(where, section, "an object")
        return Fields(self.path, [(f"{where}.", section)])

    def preferring(self, name) -> "Fields":
        """The same fields, but those of the section ``name``, where there is one, come first."""
        return self.inside(name, required=False).then(self)

    def then(self, other) -> "Fields":
        """These fields, and where one is absent that of ``other``."""
        return Fields(self.path, self._sections + other._sections)

    def has(self, name) -> bool:
        return any(section.get(name) is not None for _, section in self._sections)

    def integer(self, name, default=REQUIRED, least=0):
        where, value = self._find(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            self._refuse(where, value, f"a whole number of at least {least}")
        return value

    def number(self, name, default=REQUIRED, positive=True):
        where, value = self._find(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:  # or NaN
            self._refuse(where, value, "a finite number")
        if positive and value <= 0:
            self._refuse(where, value, "a positive number")
        return float(value)

    def boolean(self, name, default=REQUIRED):
        where, value = self._find(name, default)
        if value is not default and not isinstance(value, bool):
            self._refuse(where, value, "true or false")
        return value

    def text(self, name, default=REQUIRED, allowed=None):
        where, value = self._find(name, default)
        if value is not default and (not isinstance(value, str) or (allowed is not None and value not in allowed)):
            self._refuse(where, value, "text" if allowed is None else f"one of {', '.join(map(repr, allowed))}")
        return value

    def integers(self, name, default=REQUIRED, least=0):
        where, value = self._find(name, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(
                isinstance(n, int) and not isinstance(n, bool) and least <= n <= LARGEST for n in value):
            self._refuse(where, value, f"a list of whole numbers of at least {least}")
        return tuple(value)

    def texts(self, name, default=REQUIRED):
        where, value = self._find(name, default)
        if value is not default and (not isinstance(value, list) or not all(isinstance(t, str) for t in value)):
            self._refuse(where, value, "a list of texts")
        return value if value is default else tuple(value)

    def raw(self, name):
        """The value as it stands, None where there is none."""
        return self._find(name, None)[1]

    def refuse(self, name, allowed):
        """Raises ValueError for a field whose value cannot be used."""
        self._refuse(*self._find(name, None), allowed)

    def _find(self, name, default):
        for prefix, section in self._sections:
            if section.get(name) is not None:
                return prefix + name, section[name]
        if default is REQUIRED:
            raise ValueError(f"{self.path}: {self._sections[0][0]}{name}: is missing")
        return name, default

    def _refuse(self, where, value, allowed):
        found = repr(value)
        raise ValueError(f"{self.path}: {where}: {found[:80] + '...' * (len(found) > 80)}; must be {allowed}")
