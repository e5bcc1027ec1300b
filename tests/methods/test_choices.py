import pytest

from localrt.common.errors import OptionError
from localrt.quant.formats import BF16, CODECS
from localrt.quant.methods import (
    METHODS,
    default_method,
    fitting_format,
    quantized_format,
    rotation,
)


@pytest.mark.parametrize("name", CODECS)
def test_default_methods(name: str) -> None:
    format_ = CODECS[name].format
    assert default_method(format_, calibrated=True) in METHODS
    assert default_method(format_, calibrated=False) == "rtn"
    assert rotation(format_) % 16 == 0
    assert fitting_format(format_, 16 * rotation(format_)) == format_


def test_calibrated_methods() -> None:
    methods = {name: default_method(CODECS[name].format, calibrated=True) for name in CODECS}
    assert methods["int4-g32"] == methods["int4-g64m"] == methods["mxfp4"] == "mr-gptq"
    assert methods["nf4"] == methods["nvfp4"] == "mr-gptq"
    assert methods["int8-g32"] == methods["int5-g32"] == "rtn"


@pytest.mark.parametrize(
    ("name", "columns", "fitting"),
    [
        ("int4-g128", 576, "int4-g64"),
        ("int4-g128m", 160, "int4-g32m"),
        ("int4-g32", 96, "int4-g32"),
        ("nf4", 96, "int4-g32"),
        ("nf4", 48, "bf16"),
        ("nvfp4", 48, "bf16"),  # sixteen columns more than the kernels' 32
        ("int8-g64m", 96, "int8-g32m"),
        ("int6-g32", 48, "bf16"),
        ("bf16", 7, "bf16"),
    ],
)
def test_fitting_format(name: str, columns: int, fitting: str) -> None:
    assert fitting_format(quantized_format(name), columns).name == fitting


def test_other_formats_are_refused_with_the_list() -> None:
    assert quantized_format("bf16") == BF16
    for name in ("q4_k", "int3-g32", "f32", ""):
        with pytest.raises(
            OptionError, match=r"nf4, mxfp4, nvfp4, q2_k, q3_k, iq4_nl, f16, bf16, is"
        ):
            quantized_format(name)
