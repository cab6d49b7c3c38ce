"""The causal language models of the installed library, and one of them examined from name to answers."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import torch  # noqa: F401  imported before processes are forked, as is what follows
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ddtree_lab.survey.examine import Tell, examine_target
from ddtree_lab.survey.shrink import build_tiny, shrink_config


class ShrinkError(Exception):
    """No tiny model could be made of an architecture."""


def causal_architectures() -> dict[str, str]:
    """Model type → class name, a class once."""
    return _by_type(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def multimodal_architectures() -> dict[str, str]:
    """The same of models that take images beside text and are no causal LM for the library."""
    causal = set(causal_architectures().values())
    found = _by_type(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return {name: class_name for name, class_name in found.items() if class_name not in causal}


def _by_type(mapping: dict[str, Any]) -> dict[str, str]:
    types: dict[str, str] = {}
    for model_type, names in mapping.items():
        class_name = names if isinstance(names, str) else names[0]
        known = types.get(class_name)
        if known is None or (_is_name_of(model_type, class_name) and not _is_name_of(known, class_name)):
            types[class_name] = model_type
    return {
        model_type: class_name for class_name, model_type in sorted(types.items(), key=lambda item: item[1])
    }


def _is_name_of(model_type: str, class_name: str) -> bool:
    """Of several model types with one class, the one that the class is called after."""
    return class_name.lower().replace("_", "").startswith(re.sub(r"[-_]", "", model_type).lower())


def examine_architecture(class_name: str, tell: Tell = lambda step: None) -> dict[str, Any]:
    """Shrink a model class, build it, and ask it every question.

    Args:
        class_name: as `transformers` names it.

    Raises:
        ShrinkError: no tiny model could be made of it.
    """
    tell("importing")
    transformers.logging.set_verbosity_error()
    try:
        model_class = getattr(transformers, class_name)
        tell("shrinking")
        config = shrink_config(model_class.config_class)
        tell("building")
        target = build_tiny(model_class, config)
    except Exception as error:  # configs and models check themselves in many ways
        raise ShrinkError(_why(error)) from error
    decoder = target.config.get_text_config(decoder=True)
    return {
        **examine_target(target, tell),
        "num_layers": getattr(decoder, "num_hidden_layers", None),
        "num_parameters": target.num_parameters(),
    }


def _why(error: Exception) -> str:
    message = " ".join(str(error).split())
    missing = re.search(r"requires the (\S+) library", message)
    if missing and importlib.util.find_spec(missing[1]) is None:
        return f"needs the package {missing[1]}, which is not installed"
    return message if isinstance(error, ValueError) and message else f"{type(error).__name__}: {message}"
