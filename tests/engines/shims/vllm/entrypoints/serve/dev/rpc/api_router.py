"""Calls into the workers. The simulated engine answers them; these are their shapes."""

from vllm.entrypoints.serve.dev import APIRouter

router = APIRouter()


@router.post("/collective_rpc")
async def collective_rpc(raw_request):
    raise NotImplementedError
