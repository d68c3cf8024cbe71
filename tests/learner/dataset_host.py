"""A host with a cache of datasets, for tests."""

from pathlib import Path
from typing import Any

from resile_learner.datasets.cache import CachedDataset
from resile_learner.datasets.host_datasets import HostDatasets
from resile_shared.messages.datasets import Dataset
from resile_shared.storage.dataset_sources import list_source


class Host:
    """A host's cache, the sources that it reads, and what it says about them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.sources = folder / "sources"
        self.folder = folder / "cache"
        self.lines: list[str] = []
        self.cache = HostDatasets(self.folder, storage=(folder / "pool").as_uri(), **options)

    def source(self, name: str = "few", **files: str) -> Dataset:
        """Write files, and register them."""
        for path, text in (files or {"one.txt": "first", "below/two.txt": "second"}).items():
            file = self.sources / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        uri = (self.sources / name).as_uri()
        return list_source(uri).registered(name, uri)

    async def get(self, dataset: Dataset) -> CachedDataset:
        return await self.cache.get(dataset, self.lines.append)

    @property
    def num_fetched(self) -> int:
        return sum("fetching" in line for line in self.lines)

    def leftovers(self) -> list[str]:
        """What is in the cache, but locks."""
        return [path.name for path in self.folder.iterdir() if path.suffix != ".lock"]
