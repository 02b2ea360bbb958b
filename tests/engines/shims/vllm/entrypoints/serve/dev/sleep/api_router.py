"""Park and wake. The simulated engine answers them; these are their shapes."""

from vllm.entrypoints.serve.dev import APIRouter

router = APIRouter()


@router.post("/sleep")
async def sleep(raw_request):
    raise NotImplementedError


@router.post("/wake_up")
async def wake_up(raw_request):
    raise NotImplementedError


@router.get("/is_sleeping")
async def is_sleeping(raw_request):
    raise NotImplementedError
