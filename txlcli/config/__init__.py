"""Every training setting, once: type, default, bound and help; flags and YAML in, YAML out.

A setting is one line in `sections.py`. Flags, YAML keys, help, bounds and error texts derive from it through
`LEAVES`; leaf names are unique over all sections, so that flags stay flat. The three entrances

    ModelConfig(n_layer=4)        Python
    model: {n_layer: 4}           YAML, `read_settings`: every value keeps its `file:line`
    --n-layer 4                   flags, `from_flags`

run the same checks and meet in `build`, which gives a `Config` or says which flag or line is at fault.
"""

from txlcli.config.encoding import check_separator, codec_of
from txlcli.config.sections import (
    DOCUMENT_RULES,
    LEAVES,
    LENGTHS,
    Config,
    DataConfig,
    MachineConfig,
    ModelConfig,
    OptimConfig,
    SettingError,
    blame,
    build,
    build_section,
    flatten,
    from_flags,
    leaf,
    override,
    shaping_leaves,
    unescape,
    value_of,
)
from txlcli.config.setting import (
    DEFAULT,
    FLAG,
    Leaf,
    Settings,
    Sourced,
    check,
    fault_at,
    parse,
    read_number,
    shown,
)
from txlcli.config.yaml_file import (
    dump,
    dump_settings,
    find_preset,
    load,
    presets,
    read_origins,
    read_settings,
)

__all__ = [
    "DEFAULT",
    "DOCUMENT_RULES",
    "FLAG",
    "LEAVES",
    "LENGTHS",
    "Config",
    "DataConfig",
    "Leaf",
    "MachineConfig",
    "ModelConfig",
    "OptimConfig",
    "SettingError",
    "Settings",
    "Sourced",
    "blame",
    "build",
    "build_section",
    "check",
    "check_separator",
    "codec_of",
    "dump",
    "dump_settings",
    "fault_at",
    "find_preset",
    "flatten",
    "from_flags",
    "leaf",
    "load",
    "override",
    "parse",
    "presets",
    "read_number",
    "read_origins",
    "read_settings",
    "shaping_leaves",
    "shown",
    "unescape",
    "value_of",
]
