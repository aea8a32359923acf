"""Every mistake a user can make, as one exception family: the value, the limit, the next step."""


class TwinError(Exception):
    """A refusal that a user can act on. Only the command line turns it into exit code 2."""


class ConfigError(TwinError):
    """A model configuration or one of our own YAML files is incomplete, contradictory or
    unknown.
    """


class HardwareError(TwinError):
    """A device or node description is wrong, or the hardware cannot hold what is planned for it."""


class PlanError(TwinError):
    """The options cannot be planned for this model and node."""


class InvalidPlan(TwinError):
    """The proof found a plan that could hang, race, or compute a wrong value."""


class CheckpointError(TwinError):
    """A checkpoint is corrupt, truncated, or does not match its configuration."""


class ToolchainError(TwinError):
    """A compiler or driver that the engine needs is missing or failed."""


class OutputError(TwinError):
    """A file that a user named cannot be written."""


class EngineError(TwinError):
    """The native engine stopped: cancelled, hung, or out of a device resource."""


class CalibrationError(TwinError):
    """A probe run or a fit is missing, incomplete or inconsistent."""
