"""Which models there are, and what requests call them. Lives on the event loop."""

from __future__ import annotations

from collections.abc import Callable

from vllm_metal.config import Config
from vllm_metal.errors import ModelNotFound
from vllm_metal.hub.names import AliasSource, HubSource, PathSource, Source, config_for, configured_source
from vllm_metal.server.adapter_names import adapter_names
from vllm_metal.server.model_directory import ListedModel, ModelDirectory
from vllm_metal.server.resident_model import ResidentModel


class Roster:
    """The models that are wanted from the start, and those on disk that were asked for: each is one
    ResidentModel, by whatever name it is called. `on_change` is theirs.
    """

    def __init__(self, config: Config, on_change: Callable[[], None]) -> None:
        self._config = config
        self._on_change = on_change
        self._directory = ModelDirectory(config)
        source = configured_source(config.models)
        #: Names of the default model.
        self.served_names = list(config.models.served_names) or [_served_name(source)]
        #: The default one first.
        self.models: list[ResidentModel] = []
        self.default = self._add(self.served_names[0], source, config_for(config.models.default, config))
        #: LoRA adapters, each with a name of its model.
        self.adapters = adapter_names(config, self.served_names[0])
        own_adapters = self.default.config.models.adapters
        self._by_name = dict.fromkeys((*self.served_names, *own_adapters), self.default)
        if not config.models.served_names:
            # Who named a path or a revision to the server may name it so in requests too.
            self._by_name |= dict.fromkeys((config.models.default, str(source)), self.default)

    def add_configured(self, name: str) -> ResidentModel | None:
        """The model of a section, to be fetched if it is not on disk. None for a name that can mean something
        only among the models on disk, as names in requests do.
        """
        try:
            config = config_for(name, self._config)
            source = configured_source(config.models)
        except ModelNotFound:
            return None
        model = next((each for each in self.models if each.source == source), None)
        model = model or self._add(_served_name(source), source, config)
        for each in (name, model.name):
            self._by_name.setdefault(each, model)
        return model

    async def find(self, name: str | None) -> ResidentModel:
        """The one that answers to `name`, or to no name. Raises ModelNotFound."""
        if not name:
            return self.default
        model = self._by_name.get(name)
        if model is not None and (model.source is not None or model.is_under_way):
            return model
        found = await self._directory.find(self.adapters.get(name, name), self.served_names)
        model = self._known(found)
        if model is None:
            config = self._config.for_model(found.local.name, synonyms=found.names)
            model = self._add(found.local.name, None, config)
            model.local = found.local
        self._by_name[name] = model
        # It is shown by this one, and may outlive its files.
        self._by_name.setdefault(model.name, model)
        return model

    async def listed(self) -> list[tuple[ListedModel | None, ResidentModel | None]]:
        """All that requests may ask for, the default model first: what its files tell, and its life here."""
        found = [(each, self._known(each)) for each in await self._directory.models()]
        on_disk = {model for _, model in found}
        gone = [
            (None, model)
            for model in self.models
            if model not in on_disk and (model is self.default or model.is_under_way)
        ]
        return sorted([*found, *gone], key=lambda each: each[1] is not self.default)

    def names_of(self, model: ResidentModel) -> set[str]:
        """Those that are known of before anybody looks at the disk, or were asked for."""
        return {name for name, each in self._by_name.items() if each is model and name not in self.adapters}

    def _add(self, name: str, source: Source | None, config: Config) -> ResidentModel:
        model = ResidentModel(name, source, config, on_change=self._on_change)
        self.models.append(model)
        return model

    def _known(self, listed: ListedModel) -> ResidentModel | None:
        for model in self.models:
            if model.local is not None and model.local.path == listed.local.path:
                return model
        # One that is to be fetched may turn out to be there.
        called = (self._by_name.get(name) for name in listed.names)
        return next((model for model in called if model and model.local is None), None)


def _served_name(source: Source) -> str:
    """What the user called it: a repository or alias by name, a path by its last part."""
    match source:
        case HubSource(repo):
            return repo
        case PathSource():
            return source.name
        case AliasSource(name):
            return name
