"""Caches. The simulated engine answers them; these are their shapes."""

from vllm.entrypoints.serve.dev import APIRouter

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(raw_request):
    raise NotImplementedError


@router.post("/reset_mm_cache")
async def reset_mm_cache(raw_request):
    raise NotImplementedError


@router.post("/reset_encoder_cache")
async def reset_encoder_cache(raw_request):
    raise NotImplementedError
