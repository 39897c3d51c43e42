"""`txl config`."""

import sys
from pathlib import Path
from typing import Annotated

from txlcli import UserError
from txlcli import config as settings_of
from txlcli.cli.app import command
from txlcli.cli.flags import JsonFlag, argument, option
from txlcli.config import LEAVES, Settings, Sourced
from txlcli.report import Screen, escape_controls, json_text, presets_table, settings_table, value_text


@command(examples=["txl config --run runs/corpus", "txl config mem_len", "txl config -c enwik8.yaml --json"])
def config(
    key: Annotated[str | None, argument("KEY", help="explain this setting")] = None,
    *,
    is_list: Annotated[bool, option("--list", help="list the presets")] = False,
    run: Annotated[str | None, option("--run", metavar="DIR", help="settings of this run")] = None,
    config_file: Annotated[
        str | None, option("--config", "-c", metavar="NAME|FILE", help="settings of a preset or YAML file")
    ] = None,
    is_json: JsonFlag = False,
) -> None:
    """Show settings and where each comes from.

    Prints the settings of a run, of a preset or file, or the defaults, which `txl train` without -c
    replaces by its plan where they are marked so. With KEY, explains one setting; --list names the
    presets.
    """
    out = Screen.of(sys.stdout)
    if run is not None and config_file is not None:
        raise UserError("--config: cannot go with --run; give one of them")
    if is_list and (key or run or config_file):
        raise UserError("--list: goes alone or with --json; leave out KEY, --run and --config")
    if is_list:
        presets = {name: (path, _summary(path)) for name, path in settings_of.presets().items()}
        if is_json:
            listed = [
                {"name": name, "file": str(path), "summary": text} for name, (path, text) in presets.items()
            ]
            out.write_text(json_text(listed, indent=1).encode() + b"\n")
        elif presets:
            out.draw(presets_table({name: text for name, (_, text) in presets.items()}))
        return
    leaf = None if key is None else settings_of.leaf(key)
    settings = _settings(run, config_file)
    if is_json:
        rows = [
            {
                "key": found.key,
                "value": settings[found.name].value,
                "origin": settings[found.name].origin,
                "default": found.default,
                "help": found.help,
            }
            for found in LEAVES
            if leaf in (None, found)
        ]
        out.write_text(json_text(rows if leaf is None else rows[0], indent=1).encode() + b"\n")
    elif leaf is None:
        out.draw(settings_table(settings))
    else:
        out.write(leaf.explain())
        if run is not None or config_file is not None:
            here = settings[leaf.name]
            out.write(
                f"  here     {escape_controls(value_text(here.value))}  ({escape_controls(here.origin)})"
            )


def _settings(run_name: str | None, config_file: str | None) -> Settings:
    """All settings of a run, of a file or the defaults, each with its origin."""
    if run_name is not None:
        from txlcli.run import open_run

        path = open_run(run_name).config_path
        origins = settings_of.read_origins(path)
        return {
            name: Sourced(value, origins.get(name, str(path)))
            for name, value in settings_of.flatten(settings_of.load(path)).items()
        }
    given: Settings = {}
    if config_file is not None:
        given = settings_of.read_settings(settings_of.find_preset(config_file))
    return {
        name: given[name] if name in given else Sourced(value, settings_of.DEFAULT)
        for name, value in settings_of.flatten(settings_of.build(given)).items()
    }


def _summary(path: Path) -> str:
    """The first comment line of a preset."""
    from txlcli.files import read_bounded

    first = read_bounded(path, 1 << 20).decode("utf-8", "replace").partition("\n")[0]
    return (
        first.removeprefix("#").strip().removeprefix("Reproduces:").strip() if first.startswith("#") else ""
    )
