"""torch's list of operations with samples, imported without the warnings that some NumPys give for how it is made."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo

__all__ = ["OpInfo", "op_db"]
