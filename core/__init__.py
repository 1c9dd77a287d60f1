"""Policy over the platform layer: tags, sleep levels, KV initialisation, reports, verification."""

from hal.core.backup import BackupOptions
from hal.core.kv_init import AuditFinding, KVInitScope
from hal.core.report import SleepPlan, SleepReport, TagPlan, TagReport, WakePlan, WakeReport
from hal.core.sleep import SleepManager, State
from hal.core.tags import LEVELS, Policy

__all__ = [
    "LEVELS",
    "AuditFinding",
    "BackupOptions",
    "KVInitScope",
    "Policy",
    "SleepManager",
    "SleepPlan",
    "SleepReport",
    "State",
    "TagPlan",
    "TagReport",
    "WakePlan",
    "WakeReport",
]
