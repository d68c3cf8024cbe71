"""IBM's ``pth_parameter_mgr``."""

from resile.integrations.ibm_edt.parameters import (
    getEpoch,
    getLearningRate,
    getOptimizer,
    getTestBatchSize,
    getTestData,
    getTrainBatchSize,
    getTrainData,
    getValData,
)

__all__ = [
    "getEpoch",
    "getLearningRate",
    "getOptimizer",
    "getTestBatchSize",
    "getTestData",
    "getTrainBatchSize",
    "getTrainData",
    "getValData",
]
