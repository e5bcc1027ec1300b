"""Types of the steps' weights as torch keeps them; objects are made by the classes themselves."""

from torch import Tensor

from localrt.quant.ops import attention, experts, protocol, recurrent, streams

AttentionWeights = attention.AttentionWeights[Tensor, Tensor]
LatentWeights = attention.LatentWeights[Tensor, Tensor]
IndexWeights = attention.IndexWeights[Tensor, Tensor]
ConnectionWeights = streams.ConnectionWeights[Tensor, Tensor]
InputProjection = streams.InputProjection[Tensor, Tensor]
InputGateWeights = streams.InputGateWeights[Tensor, Tensor]
NgramWeights = streams.NgramWeights[Tensor, Tensor]
RouterWeights = experts.RouterWeights[Tensor, Tensor]
RecurrentWeights = recurrent.RecurrentWeights[Tensor, Tensor]
MlpWeights = protocol.MlpWeights[Tensor, Tensor]
ExpertTable = experts.ExpertTable[Tensor, Tensor]
