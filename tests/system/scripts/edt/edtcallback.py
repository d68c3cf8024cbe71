"""A logger with the oldest signatures, as scripts bring it along."""

from callbacks import LoggerCallback
from elog import ELog
from emetrics import EMetrics


class ScoreLogger(LoggerCallback):
    def __init__(self):
        self.steps = 0

    def log_train_metrics(self, loss, acc, completed_batch, worker=0):
        self.steps += 1
        with EMetrics.open() as metrics:
            metrics.record(EMetrics.TRAIN_GROUP, completed_batch, {"loss": loss, "accuracy": acc / 100.0})
        with ELog.open() as log:
            log.recordTrain("Train", completed_batch, self.steps, loss, acc / 100.0, worker)

    def log_test_metrics(self, loss, acc, completed_batch, worker=0):
        with EMetrics.open() as metrics:
            metrics.record(EMetrics.TEST_GROUP, completed_batch, {"loss": loss, "accuracy": acc / 100.0})
