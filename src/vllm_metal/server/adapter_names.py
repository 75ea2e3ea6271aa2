"""What requests may call LoRA adapters: each is served by a name of its own, beside its model."""

from __future__ import annotations

from vllm_metal.config import Config
from vllm_metal.errors import ConfigError, ModelNotFound
from vllm_metal.hub.names import config_for, configured_source


def adapter_names(config: Config, default_name: str) -> dict[str, str]:
    """The name of each adapter with that of its model: `default_name`, or that of the section that has it.

    Raises ConfigError for a name that stands for something else, too.
    """
    models = config.models
    taken = {default_name, *models.served_names, *models.aliases, *config.model_sections, models.default}
    model_of: dict[str, str] = {}
    source_of: dict[str, str] = {}
    for model in (models.default, *config.model_sections):
        try:
            own = config_for(model, config).models
            source = str(configured_source(own))
        except ModelNotFound:  # a name that means something among the models of this machine alone
            own, source = config.for_model(model).models, model
        for name in own.adapters:
            if name in taken:
                raise ConfigError(
                    f"`{name}` is the name of a model and of an adapter of `{model}`",
                    hint="give the adapter another name",
                )
            if source_of.setdefault(name, source) != source:
                raise ConfigError(
                    f"`{name}` is the name of an adapter of `{model_of[name]}` and of one of `{model}`",
                    hint="give one of them another name",
                )
            model_of.setdefault(name, default_name if model == models.default else model)
    return model_of
