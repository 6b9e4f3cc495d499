"""Names of version 0.1 under their old spelling: modules, names, methods, fields and flags, accepted until 0.3.0.

`renamed.json` maps old module paths to new ones, and old names of each package to where they are now. Each old spelling
warns once per process (FutureWarning). Nothing is read before an old name is used.
"""

import functools
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any, ParamSpec, TypeVar

REMOVED_IN = "0.3.0"
VALUES = {
    "backend": {"carrier": "emulated"},
    "residuals": {"fast": "operands"},
    "source": {"forward": "requantize_forward"},
}
"""Field or parameter -> {old value: new value}."""
Class = TypeVar("Class", bound=type)
Params = ParamSpec("Params")
Return = TypeVar("Return")
_warned: set[str] = set()


class RenamedWarning(FutureWarning):
    """An old name was used."""


@functools.cache
def renamed_names() -> dict[str, dict[str, Any]]:
    """Returns {"modules": {old path: new path}, "names": {old package: {old name: new path}}}, without "halfbyte."."""
    table: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return table


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warns that `old` is now `new`, once per process and name."""
    if old not in _warned:
        _warned.add(old)
        text = f"{old} was renamed: use {new}. The old name goes in Halfbyte {REMOVED_IN}"
        warnings.warn(text, RenamedWarning, stacklevel=stacklevel)


def shorten_warnings() -> None:
    """Makes a command show a `RenamedWarning` as one line: the place in our code means nothing to its user."""
    usual = warnings.formatwarning

    def format_warning(message: Any, category: type[Warning], *where: Any, **line: Any) -> str:
        short = issubclass(category, RenamedWarning)
        return f"halfbyte: {message}\n" if short else usual(message, category, *where, **line)

    warnings.formatwarning = format_warning


def renamed_attribute(module: str, name: str) -> Any:
    """Returns what the old `name` of `module` (its old path) stands for; AttributeError if it never was a name."""
    path = module.removeprefix("halfbyte.")
    new = renamed_names()["names"].get(path, {}).get(name)
    if new is None and (moved := renamed_names()["modules"].get(path)):
        new = f"{moved}.{name}"
    owner, _, attribute = f"halfbyte.{new}".rpartition(".")
    if new is None or name.startswith("__") or not (found := _find(owner, attribute)):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_renamed(f"{module}.{name}", f"halfbyte.{new}", stacklevel=4)
    return found[0]


def _find(owner: str, attribute: str) -> list[Any]:
    """Returns [attribute of the module `owner`], a submodule included; [] if there is none."""
    module = import_module(owner)
    if not hasattr(module, attribute):
        try:
            import_module(f"{owner}.{attribute}")
        except ModuleNotFoundError:
            return []
    return [getattr(module, attribute)]


def old_names(module: str, later: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a module that kept its path and whose names changed. Names of `later` (submodule ->
    names) are imported when they are first used.
    """
    home = {name: part for part, names in later.items() for name in names}

    def attribute(name: str) -> Any:
        if name not in home:
            return renamed_attribute(module, name)
        value = getattr(import_module(f"{module}.{home[name]}"), name)
        setattr(sys.modules[module], name, value)
        return value

    return attribute


def renamed_members(**new_of: str) -> Callable[[Class], Class]:
    """Decorates a class: constructor and attributes accept the old names of its fields and methods, old="new"."""

    def decorate(kind: Class) -> Class:
        built = kind.__init__  # type: ignore[misc]

        @functools.wraps(built)
        def __init__(self: Any, *args: Any, **fields: Any) -> None:
            for old in new_of.keys() & fields.keys():
                warn_renamed(f"{kind.__name__}.{old}", f"{kind.__name__}.{new_of[old]}")
                fields[new_of[old]] = fields.pop(
                    old
                )  # dataclasses.replace(x, old=v) gives both names: the old one wins
            built(self, *args, **fields)

        kind.__init__ = __init__  # type: ignore[misc]
        kind.RENAMED = new_of  # type: ignore[attr-defined]  # read by io.dataclass_json
        for old, new in new_of.items():
            setattr(kind, old, property(functools.partial(_read_member, kind.__name__, old, new)))
        return kind

    return decorate


def renamed_value(field: str, value: Any) -> Any:
    """Returns the new spelling of a value of `field`."""
    new = VALUES[field].get(value, value) if isinstance(value, str) else value
    if new != value:
        warn_renamed(f"{field}={value!r}", f"{field}={new!r}", stacklevel=4)
    return new


def renamed_parameters(**new_of: str) -> Callable[[Callable[Params, Return]], Callable[Params, Return]]:
    """Decorates a function: accepts the old names of its keyword parameters, old="new", and old values (VALUES)."""

    def decorate(function: Callable[Params, Return]) -> Callable[Params, Return]:
        @functools.wraps(function)
        def call(*args: Params.args, **options: Params.kwargs) -> Return:
            for old in new_of.keys() & options.keys():
                warn_renamed(f"{function.__name__}({old}=)", f"{function.__name__}({new_of[old]}=)")
                options[new_of[old]] = options.pop(old)
            for field in VALUES.keys() & options.keys():
                options[field] = renamed_value(field, options[field])
            return function(*args, **options)

        return call

    return decorate


def _read_member(kind: str, old: str, new: str, value: Any) -> Any:
    warn_renamed(f"{kind}.{old}", f"{kind}.{new}", stacklevel=4)
    return getattr(value, new)


class _OldModule(ModuleType):
    """A module under its old path.

    Its import binds it in the parent package. In 0.1 a function of the same name stood there (`halfbyte.recipe`,
    `halfbyte.ops.dot_general`), so the module can be called like that function.
    """

    function: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        return renamed_attribute(self.__name__, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)


class _OldModuleLoader(Loader):
    """Loads a module of 0.1 as an `_OldModule`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Keeps the parent's function of the same name, if any; other names are looked up when they are used."""
        parent, _, name = module.__name__.rpartition(".")
        package = import_module(parent)
        is_public = parent == "halfbyte" and name in package._PACKAGE_OF
        function = getattr(package, name) if is_public else vars(package).get(name)
        if callable(function):
            module.__dict__["function"] = function

    def get_code(self, name: str) -> CodeType:
        """Returns what `python -m` runs: the module under its new path."""
        new = f"halfbyte.{renamed_names()['modules'][name.removeprefix('halfbyte.')]}"
        warn_renamed(name, new)
        return compile(f"import runpy; runpy.run_module({new!r}, run_name='__main__', alter_sys=True)", name, "exec")


def find_old_module(name: str) -> ModuleSpec | None:
    """Returns the spec of a module by its old path; None for other names."""
    old, moved = name.removeprefix("halfbyte."), renamed_names()["modules"]
    is_package = any(path.startswith(f"{old}.") for path in moved)
    return ModuleSpec(name, _OldModuleLoader(), is_package=is_package) if old in moved else None
