"""What is verified: an engine with its manager on a platform, made fresh for each case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hal.core.backup import BackupOptions
from hal.core.kv_init import Nesting
from hal.core.sleep import SleepManager
from hal.core.verify.engine import Execution, ReferenceEngine
from hal.core.verify.state import EngineConfig
from hal.platform import Platform


@dataclass(frozen=True)
class Setup:
    """Everything that an engine is built from."""

    platform: Platform
    device: int = 0
    backing: str | None = None
    retain: bool = False
    compress: str | None = None
    budget: int | None = None
    nesting: Nesting = "auto"
    execution: Execution = "eager"
    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def backup(self) -> BackupOptions:
        """How its backups are kept."""
        return BackupOptions(
            budget=self.budget, retain=self.retain, compress=self.compress, backing=self.backing
        )


class Subject:
    """An engine and its manager; memory without contents is poisoned, so that reading it shows."""

    manager_type: ClassVar[type[SleepManager]] = SleepManager
    engine_type: ClassVar[type[ReferenceEngine]] = ReferenceEngine

    def __init__(self, setup: Setup) -> None:
        self.device = setup.platform.device(setup.device)
        self.retains = setup.retain
        """Whether backups are meant to stay over a wake."""
        self.compresses = setup.compress is not None
        """Whether their size depends on what they hold."""
        self.others_mapped = self.device.counters().mapped_bytes
        """Bytes that others had mapped on the device before this engine was there."""
        self.sleeper = self.manager_type(
            setup.platform,
            device=setup.device,
            backup=setup.backup,
            debug=True,
        )
        self.engine = self.engine_type(
            self.sleeper, setup.engine, nesting=setup.nesting, execution=setup.execution
        )

    def close(self) -> None:
        """Give everything back, whether it is awake or asleep."""
        self.engine.close()
        self.sleeper.close()
