"""Types of the options that several commands share, and the option of each setting, for cyclopts.

`--train.steps` is the setting `steps` of the section `train`; `--steps` is equivalent because `steps` is unique.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_type_hints

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from jaxgpt.config import (
    DataConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PostConfig,
    SamplingParams,
    TrainConfig,
)
from jaxgpt.settings import Section

# The sections of settings. `TrainConfig` has the prefix "train": its field `steps` is the option --train.steps.
SECTIONS: tuple[type[Section], ...] = (
    ModelConfig,
    DataConfig,
    OptimConfig,
    TrainConfig,
    MeshConfig,
    LoraConfig,
    PostConfig,
)


def shown_default(default: Any) -> str | None:
    """Format the default of an option for its help; None: the default is empty, 0 or False, and not shown."""
    if not default or default == ("",):
        return None
    return repr(default).strip("'")


# Settings of cyclopts for all options; functions of commands add help and validators.
EVERY = Parameter(
    consume_multiple=True, allow_repeating=True, negative_bool=(), negative_iterable=(), show_default=shown_default
)
FLAT = Parameter(name="*")  # fields of a class as top-level options: --top-k
ON = Parameter(negative_bool="no-")  # --no-NAME to turn the option off


def setting_options() -> dict[str, Any]:
    """Return the type of each setting's option, keyed by the setting: {"train.steps": Annotated[int, ...], ...}.

    The types have no defaults: an omitted setting comes from a preset, a run or a file. `option_help.PresetHelp` prints the
    values of a preset.
    """
    # `--steps` is unique if no other section has this setting, and no section has this name.
    count = Counter[str]()
    for section in SECTIONS:
        count[section.prefix] += 1
        count.update(field.name for field in fields(section))

    options = dict[str, Any]()
    for section in SECTIONS:
        types = get_type_hints(section)
        group = Group.create_ordered(section.prefix.capitalize())
        for field in fields(section):
            setting = f"{section.prefix}.{field.name}"
            names = [option_name(setting)]
            if count[field.name] == 1:
                names.append(option_name(field.name))
            parameter = Parameter(name=names, help=field.metadata["help"], group=group)
            options[setting] = Annotated[types[field.name], parameter, ON]
    return options


def sampling_options() -> dict[str, Any]:
    """Return the type of the option of each field of `SamplingParams`, keyed by the field.

    The types have no defaults: an omitted field comes from the model or, by default, from `SamplingParams`. The help shows the
    default of `SamplingParams`.
    """
    types = get_type_hints(SamplingParams)
    options = dict[str, Any]()
    for field in fields(SamplingParams):
        parameter = Parameter(help=field.metadata["help"], show_default=shown_default(field.default))
        options[field.name] = Annotated[types[field.name], parameter]
    return options


def option_name(setting: str) -> str:
    """Return the option of a setting: "train.batch_size" is --train.batch-size."""
    return f"--{setting.replace('_', '-')}"


# cyclopts reads the options of a command from the annotations of its function, so these types are built from the settings
# when this module is imported. For mypy, they are dicts.
if TYPE_CHECKING:
    Settings = dict[str, Any]
    Sampling = dict[str, Any]
else:
    # The settings on a command line, keyed by dotted name: {"train.steps": 10}.
    Settings = TypedDict("Settings", setting_options(), total=False)
    # The fields of `SamplingParams` on a command line, keyed by name: {"top_k": 50}.
    Sampling = TypedDict("Sampling", sampling_options(), total=False)

GivenSettings = Annotated[Settings, FLAT]
NO_SETTINGS = Settings()
GivenSampling = Annotated[Sampling, FLAT]
NO_SAMPLING = Sampling()
Json = Annotated[bool, Parameter(help="print one JSON object instead of text")]
Checkpoint = Annotated[
    str,
    Parameter(help="checkpoint to load: best (lowest validation loss; with rewards, highest reward), last, or a step"),
]
Weights = Annotated[Literal["float32", "bfloat16", "int8"], Parameter(help="precision of the weights in memory")]
Seed = Annotated[int, Parameter(help="random seed", validator=Number(gte=0, lt=2**32))]
Count = Annotated[int, Parameter(validator=Number(gte=0))]
Special = Annotated[bool, Parameter(help="encode special tokens in the prompt, such as <|im_end|>, as their ids")]
