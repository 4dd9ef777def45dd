"""A small run of every kernel, to be watched by compute-sanitizer."""

from __future__ import annotations

import torch

from loopkv.kernels.cases import CaseSpec, make_case
from loopkv.kernels.operators import CudaOperators, StepView


def main() -> None:
    """Decode (plain and with V precision), a mixed step and coding, for every option; both paths."""
    device = torch.device("cuda")
    for options, tau in ((("share", "int4"), 14.0), (("int2", "bf16"), None), (("int4", "int4"), None)):
        spec = CaseSpec((352, 0, 520), 2, 1, 128, options, tau, keep_exact=True)
        case = make_case(spec, device)
        start = torch.tensor([0, 20, 20, 60], dtype=torch.int32, device=device)
        for fused in (True, False):
            operators = CudaOperators(case.layout, spec.dtype, max_rows=4, device=device, fused=fused)
            decode = StepView(case.pool, case.history_table, case.window_table, case.seq_lens, None, 3)
            mixed = StepView(case.pool, case.history_table, case.window_table, case.seq_lens, start, 3)
            operators.code_leaving_pages(decode)
            operators.code_leaving_pages(mixed)
            for cell in range(2):
                out = torch.zeros_like(case.q[cell])
                operators.attend(cell, case.q[cell], case.k_new[cell], case.v_new[cell], out, decode)
                q = torch.zeros(60, 2, 128, dtype=spec.dtype, device=device)
                kv = torch.zeros(60, 2, 128, dtype=spec.dtype, device=device)
                operators.attend(cell, q, kv, kv.clone(), torch.zeros_like(q), mixed, max_queries=40)
    torch.cuda.synchronize()
    print("ran every kernel")


if __name__ == "__main__":
    main()
