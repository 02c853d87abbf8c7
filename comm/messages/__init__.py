"""Control messages between processes, grouped by subject: run, leases, queue, saved queue, serving, weights, migration.

Invariant: a message is a frozen struct; a malformed or foreign message is counted, logged and dropped.
Start reading at `base.py` (the base class and ids), then `leases.py`.
"""

# ruff: noqa: F401 - all of these are for importers of the package

from . import migration
from .base import GroupId, Message, RowId
from .codec import decode, encode
from .leases import (
    DrawnTokens,
    HeldRows,
    Lease,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    LoadReport,
    PromptRefused,
    RowDone,
    RowsStreamed,
    SampleScored,
)
from .queue import (
    ColumnsAdded,
    DropRows,
    EvaluationResult,
    EvaluationsDone,
    ListStoredRows,
    NoRowsYet,
    RequestRows,
    RowBatch,
    RowRef,
    RowsNotFound,
    StoredRows,
    TrainBatch,
)
from .run import (
    ActorFailed,
    BusyReport,
    CheckpointRequested,
    CheckpointWritten,
    DeclaredDead,
    DrainRequested,
    Failed,
    Interrupted,
    LearningAlarm,
    MemberStatus,
    RestartPoint,
    StatusReport,
    StatusRequested,
    StepTrained,
    Stop,
    TrainerStarted,
    TrainerState,
    TrainingDone,
    WaitStatus,
)
from .saved_queue import QueueRestored, QueueSaved, RestoreQueue, SaveQueue
from .serving import ServedPiece, ServedPrompt, ServedSample, ServedTokens, ServeSequences
from .weights import (
    OpenPullLink,
    OpenPushLink,
    SwitchWeights,
    VersionReady,
    WeightsPulled,
)
