"""Every error this project raises on purpose, in one tree.

    BgeM3Error
    ├── ConfigError                   configuration that cannot be obeyed (exit code 2)
    ├── ModelError                    the model cannot be obtained or used: the start stops
    │   ├── CacheDirectoryError       the cache directory cannot be created or written
    │   ├── DownloadError             the hub did not deliver a file
    │   ├── CorruptFileError          a model file is truncated or its hash differs
    │   ├── UnsafeWeightsError        a weights file holds something other than plain tensors
    │   ├── ContractError             the graph fits no known layout
    │   ├── PreparationError          its faster form cannot be built, or strays too far from it
    │   ├── EngineError               the engine cannot run the model on this machine
    │   ├── ProviderError             an execution provider that was asked for is not there
    │   └── SelfTestError             the loaded model does not return what it must
    ├── InvalidInputError             the caller's input breaks a stated rule
    │   ├── HeadUnavailableError      the loaded model has no such head
    │   └── RequestTooLargeError      the request would not even fit an empty queue
    ├── UnavailableError              the server cannot do the work at the moment
    │   ├── NotReadyError             loading, measuring or stopping
    │   ├── NoWorkersError            no worker is alive
    │   ├── QueueFullError            too much work is waiting
    │   └── DeadlineExceededError     the work was not done within the time that the caller set
    └── InferenceError                the engine failed on work that was valid
        ├── NonFiniteOutputError      a text's output holds NaN or infinity
        └── OutOfMemoryError          there was not enough memory for a forward pass

Messages name the value, the limit and the way out. A door translates the class into its own wire
shape; only `InvalidInputError` and `UnavailableError` messages are meant for callers.
"""


class BgeM3Error(Exception):
    """Root of the tree."""


class ConfigError(BgeM3Error):
    """Configuration that cannot be obeyed; the message lists every problem found."""


class ModelError(BgeM3Error):
    """The model cannot be obtained or used."""


class CacheDirectoryError(ModelError):
    """The model cache directory cannot be created or written."""


class DownloadError(ModelError):
    """The hub did not deliver a file."""


class CorruptFileError(ModelError):
    """A model file is truncated or its hash differs from the pinned one."""


class UnsafeWeightsError(ModelError):
    """A weights file holds something other than plain tensors."""


class ContractError(ModelError):
    """The graph fits no known layout, or contradicts the files beside it."""


class PreparationError(ModelError):
    """The model's faster form cannot be built, or strays too far from the model."""


class EngineError(ModelError):
    """The engine cannot run the model on this machine; another one may."""


class ProviderError(ModelError):
    """An execution provider that was asked for is not available."""


class SelfTestError(ModelError):
    """The loaded model does not return what it must."""


class InvalidInputError(BgeM3Error):
    """The caller's input breaks a stated rule.

    `param` names the offending request field, e.g. ``input`` or ``input[3]``.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class HeadUnavailableError(InvalidInputError):
    """The loaded model has no such head."""


class RequestTooLargeError(InvalidInputError):
    """The request would not even fit an empty queue: it has to be split."""


class UnavailableError(BgeM3Error):
    """The server cannot do the work at the moment; trying again later is right."""


class NotReadyError(UnavailableError):
    """Models are still loading or being measured, or the server is stopping.

    `retry_after_seconds`: when trying again makes sense, where that is known.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NoWorkersError(UnavailableError):
    """No worker is alive."""


class QueueFullError(UnavailableError):
    """Too much work is waiting; there should be room again after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceededError(UnavailableError):
    """The work was not done within the time that the caller set."""


class InferenceError(BgeM3Error):
    """The engine failed on work that was valid.

    `index` is the place in its request of the text that makes the engine fail, where that is known.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class NonFiniteOutputError(InferenceError):
    """A text's output holds NaN or infinity."""


class OutOfMemoryError(InferenceError):
    """There was not enough memory for a forward pass; a smaller one may succeed."""
