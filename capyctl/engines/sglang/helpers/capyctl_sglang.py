"""Run by an installation's own interpreter: `version`, `probe` what the build can do, `serve` starts its server.

`serve` reads the command line twice with the installed parser: what CapyCTL rendered, and the whole. Whatever
CapyCTL owns must come out the same, however the rest spells or abbreviates. The keys come through the
environment and are taken out of it; they are on no command line. Then SGLang's own record of settings is built
and resolved, what CapyCTL owns is compared once more, and the HTTP server starts in this process, behind a guard.

This file imports nothing of CapyCTL: it is copied beside its data and runs without CapyCTL's packages.
Source: engines 2.5, 3.3, 5, 7.1, 7.4.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import hmac
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import stat
import sys
import traceback
from typing import Any, NoReturn

REFUSED = 78
RESERVED_FILE = "capyctl_sglang_reserved.json"
KEY, ADMIN_KEY, RENDEZVOUS = "CAPYCTL_ENGINE_API_KEY", "CAPYCTL_ENGINE_ADMIN_KEY", "CAPYCTL_RENDEZVOUS_DIR"
ROUTES = ("flush_cache", "release_memory_occupation", "resume_memory_occupation", "update_weights_from_disk")
GAUGES = ("sglang:num_running_reqs", "sglang:num_queue_reqs")
PLUGIN_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
ACCEPTED_PLUGINS = frozenset({"smg-grpc-servicer"})
REVALIDATED = (
    *("model_path", "tokenizer_path", "served_model_name", "host", "port", "api_key", "admin_api_key"),
    *("tp_size", "pp_size", "nnodes", "node_rank", "mem_fraction_static", "cpu_offload_gb"),
    *("enable_memory_saver", "enable_weights_cpu_backup", "enable_metrics", "skip_server_warmup", "log_requests"),
    *("crash_dump_folder", "disaggregation_mode", "tokenizer_worker_num"),
)
"""What must still be as it was rendered after SGLang resolved its settings."""
FILE_BYTES_MAX = 8 << 20
UNAUTHORIZED = b'{"error":"Unauthorized"}'


def refuse(code: str, message: str) -> NoReturn:
    """End with one line that CapyCTL reads from the log."""
    print(f"capyctl_refused {code} {message}", file=sys.stderr, flush=True)
    sys.exit(REFUSED)


def tell(event: dict[str, str]) -> None:
    """One line of news in the engine's log."""
    print(json.dumps(event), file=sys.stderr, flush=True)


def open_packages() -> str:
    """Put the environment's packages on the path, without running its `.pth` hooks; returns its prefix."""
    prefix = os.path.dirname(os.path.dirname(sys.executable))
    if os.path.exists(os.path.join(prefix, "pyvenv.cfg")):
        sys.prefix = sys.exec_prefix = prefix
    real = {os.path.realpath(place) for place in sys.path}
    for lib in ("lib", "lib64"):
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        packages = os.path.join(prefix, lib, name, "site-packages")
        # One package lies beside the others and is found by a `.pth` hook alone.
        for place in (packages, os.path.join(packages, "nvidia_cutlass_dsl", "python_packages")):
            if os.path.isdir(place) and os.path.realpath(place) not in real:
                sys.path.append(place)
                real.add(os.path.realpath(place))
    return prefix


def owned() -> dict[str, list[str]]:
    """The options that CapyCTL owns, by one spelling each: `always` there, and `if_present`."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), RESERVED_FILE), encoding="utf-8") as stream:
        found: dict[str, list[str]] = json.load(stream)
    return found


# --- plugins ---------------------------------------------------------------------------------------


def check_plugins() -> None:
    """End when a package outside the accepted ones would put code into the engine."""
    for group in PLUGIN_GROUPS:
        for point in importlib.metadata.entry_points(group=group):
            package = point.dist.name if point.dist is not None else "an unknown package"
            if package.lower().replace("_", "-") not in ACCEPTED_PLUGINS:
                refuse("plugin_closure_failed", f"{package} has the SGLang plugin {point.name}. Uninstall it")


# --- capabilities ----------------------------------------------------------------------------------


def load() -> tuple[Any, dict[str, str]]:
    """The installed parser of the server, and where each of its options puts its value."""
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
    parser = argparse.ArgumentParser(prog="sglang serve")
    arguments.add_cli_args(parser)
    return parser, {name: action.dest for name, action in parser._option_string_actions.items()}


def lacks_core(defined: dict[str, str], always: list[str]) -> str:
    """What every launch needs and this parser does not define, or nothing."""
    missing = [name for name in always if name not in defined]
    if missing:
        return f"this build has no option {', '.join(missing)}"
    return "" if "launch_server" in names_in("srt/entrypoints/http_server.py") else "this build has no HTTP server"


def lacks_deep_park(defined: dict[str, str]) -> str:
    """What a park needs and this build lacks, or nothing."""
    if "--enable-memory-saver" not in defined:
        return "the option --enable-memory-saver"
    if importlib.util.find_spec("torch_memory_saver") is None:
        return "the package torch_memory_saver"
    if not {"TorchMemorySaverAdapter"} <= names_in("srt/utils/torch_memory_saver_adapter.py"):
        return "an adapter for the memory saver"
    routes = names_in("srt/entrypoints/http_server.py")
    missing = [route for route in ROUTES if route not in routes]
    if missing:
        return f"the route /{missing[0]}"
    return "" if "app" in routes else "an application that takes a guard"


def lacks_observation() -> str:
    """Which shape of the scheduler is not there, or nothing."""
    scheduler = names_in("srt/managers/scheduler.py")
    missing = [name for name in ("Scheduler.is_fully_idle", "Scheduler.flush_cache") if name not in scheduler]
    return f"the scheduler has no {missing[0]}" if missing else ""


def lacks_metrics() -> str:
    """Which scraped gauge this build does not have, or nothing."""
    texts = package_texts()
    missing = [gauge for gauge in GAUGES if not any(gauge in text for text in texts)]
    return f"this build has no gauge {missing[0]}" if missing else ""


def lacks_decisions() -> str:
    """Whether the route of decisions is missing."""
    return "" if any("/v1/systemone" in text for text in package_texts()) else "this build answers no decisions"


def package_root() -> str:
    """The directory of the package, without importing it."""
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return places[0] if places else ""


def names_in(module: str) -> frozenset[str]:
    """What a module of the package defines at its top, and the methods of its classes; nothing is executed."""
    try:
        with open(os.path.join(package_root(), module), encoding="utf-8") as stream:
            tree = ast.parse(stream.read(FILE_BYTES_MAX))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return frozenset()
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


_texts: list[str] = []


def package_texts() -> list[str]:
    """The package's own modules as text."""
    if not _texts:
        for place, folders, names in os.walk(package_root()):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(place, name)
                if name.endswith(".py") and os.path.getsize(path) <= FILE_BYTES_MAX:
                    with open(path, encoding="utf-8", errors="replace") as stream:
                        _texts.append(stream.read())
    return _texts


def probe() -> None:
    """Print the capabilities of this build."""
    _, defined = load()
    found = {
        "core": lacks_core(defined, owned()["always"]),
        "deep_park": lacks_deep_park(defined),
        "observation": lacks_observation(),
        "metrics": lacks_metrics(),
        "decisions": lacks_decisions(),
    }
    print("capyctl_probe " + json.dumps(found), flush=True)


# --- the memory saver ------------------------------------------------------------------------------


def enrol(arguments: Any, defined: dict[str, str]) -> None:
    """Make sure that the engine's memory is under the saver; else say why not, and end.

    An engine that was to park and cannot would keep its memory after it answered that it released it.
    """
    stage = "arguments"
    try:
        if not getattr(arguments, "enable_memory_saver", False):
            raise RuntimeError("the memory saver is off")
        stage = "library"
        lacks = lacks_deep_park(defined)
        if lacks:
            raise ImportError(f"this installation lacks {lacks}")
        check_library()
    except Exception as error:
        tell({"event": "capyctl_saver_enrollment_refused", "stage": stage, "exception": type(error).__name__})
        refuse("capability_missing:deep_park", str(error))


def check_library() -> None:
    """Look at who may replace the saver's libraries; it cannot be proven safe everywhere, so it is only said."""
    spec = importlib.util.find_spec("torch_memory_saver")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in {os.path.dirname(place) for place in places}:
        for name in sorted(os.listdir(place)):
            if not (name.startswith("torch_memory_saver") and ".so" in name):
                continue
            status = os.stat(os.path.join(place, name))
            problem = ""
            if status.st_mode & stat.S_IWOTH:
                problem = "writable_by_others"
            elif status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid():
                problem = "group_undetermined"
            elif status.st_uid not in (0, os.geteuid()):
                problem = "foreign_owner"
            if problem:
                tell({"event": "capyctl_saver_library_permissions", "problem": problem, "action": "warned"})


# --- serving ---------------------------------------------------------------------------------------


def compare(parser: Any, defined: dict[str, str], rendered: list[str], whole: list[str]) -> Any:
    """Both readings of the command line; returns the whole one. Ends the process when something owned differs."""
    names = owned()
    lacks = lacks_core(defined, names["always"])
    if lacks:
        refuse("capability_missing:core", lacks)
    ours = vars(parser.parse_args(rendered))
    parsed = parser.parse_args(whole)
    theirs = vars(parsed)
    for name in (*names["always"], *names["if_present"]):
        place = defined.get(name, "")
        if place and ours.get(place) != theirs.get(place):
            refuse("effective_args_mismatch", f"the arguments change {name}, which CapyCTL owns")
    return parsed


def revalidate(arguments: Any, stated: dict[str, Any]) -> None:
    """What SGLang made of the settings, against what was rendered. Never prints a value: keys are among them."""
    view = arguments
    try:
        view = importlib.import_module("sglang.srt.arg_groups.overrides").resolving_view(arguments)
    except (ImportError, AttributeError):
        pass  # older builds resolve the record itself
    for name, value in stated.items():
        if name in REVALIDATED and getattr(view, name, value) != value:
            refuse("effective_args_mismatch", f"SGLang resolved {name} to another value than was rendered")


def serve(rendered: list[str], whole: list[str], parks: bool) -> None:
    """Check the command line and become the server."""
    key, admin_key = os.environ.pop(KEY, ""), os.environ.pop(ADMIN_KEY, "")
    if not key or not admin_key:
        refuse("capability_missing:core", "the launch has no keys")
    check_plugins()
    rendezvous()
    sys.argv = ["sglang.launch_server", *whole]
    parser, defined = load()
    parsed = compare(parser, defined, rendered, whole)
    parsed.api_key, parsed.admin_api_key = key, admin_key
    stated = {name: value for name, value in vars(parsed).items() if name in REVALIDATED}
    level = getattr(logging, str(getattr(parsed, "log_level", "info")).upper(), logging.INFO)
    logging.basicConfig(level=level, format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", force=True)
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs.from_cli_args(parsed)
    if parks:
        enrol(arguments, defined)
    resolve = getattr(arguments, "resolve_once", None)
    if resolve is not None:
        resolve()  # newer builds resolve on demand, older ones when the record is built
    revalidate(arguments, stated)
    server = importlib.import_module("sglang.srt.entrypoints.http_server")
    close_open_routes(server, (key, admin_key), parks)
    try:
        server.launch_server(arguments)
    finally:
        end_children()


class KeyGuard:
    """Lets through what carries one of the launch's keys, exactly once; the engine then decides which key is for what.

    The engine's own check leaves health, readiness, figures and every WebSocket open. `/health_generate` among them
    generates whatever the settings say, which is work for any process of the machine, and the end of a parked engine.
    A class, since a function would not be called for WebSockets.
    """

    def __init__(self, app: Any, keys: tuple[str, ...]) -> None:
        self.app = app
        self.known = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self.admits(scope.get("headers") or ()):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(UNAUTHORIZED)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": UNAUTHORIZED})

    def admits(self, headers: Any) -> bool:
        """Whether a request carries a key of this launch."""
        sent = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, key = (sent[0] if len(sent) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(key).digest()
        return scheme.lower() == b"bearer" and True in [hmac.compare_digest(digest, known) for known in self.known]


def close_open_routes(server: Any, keys: tuple[str, ...], parks: bool) -> None:
    """Put the guard before every route. Without one nothing parks: any process could end what is parked."""
    add = getattr(getattr(server, "app", None), "add_middleware", None)
    if add is not None:
        add(KeyGuard, keys=keys)
    elif parks:
        refuse("capability_missing:deep_park", "this installation lacks an application that takes a guard")
    else:
        tell({"event": "capyctl_key_guard_missing", "action": "warned"})


def rendezvous() -> None:
    """One rank meets itself at a fresh file instead of a port."""
    place = os.environ.pop(RENDEZVOUS, "")
    if place:
        os.makedirs(place, mode=0o700, exist_ok=True)
        path = os.path.join(place, "store")
        if os.path.lexists(path):
            os.unlink(path)  # of an earlier launch; the store must begin empty
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{path}"


def end_children() -> None:
    """End what the server started, as its own launcher does."""
    try:
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid(), include_parent=False)
    except Exception:  # the group is ended from outside anyway
        traceback.print_exc()


def main(words: list[str]) -> None:
    """`version`, `probe`, or `serve <parks|stays> <number of rendered words> <word>...`."""
    if words[:1] == ["version"]:
        print(importlib.metadata.version("sglang"), flush=True)
        return
    if words[:1] == ["probe"]:
        probe()
        return
    count = int(words[2])
    serve(words[3 : 3 + count], words[3:], words[1] == "parks")


if __name__ in ("__main__", "__mp_main__"):  # children of the engine import this file again
    open_packages()
if __name__ == "__main__":
    main(sys.argv[1:])
