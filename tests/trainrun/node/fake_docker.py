"""A stand-in for a container engine: it takes the flags that it knows, refuses all others, and runs the command on this machine.

As with Docker, programs are children of a server, not of the client: who kills the client has ended nothing. $FAKE_DOCKER is
the server's folder, where a test says what there is: `images.json` (reference -> digest), `registry.json` (what can be
pulled), `faults.json` (subcommand -> [exit status, message]; a list of such is used up from its start), `log` (calls).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["FAKE_DOCKER"])
IMAGE_ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/root", "OF_THE_IMAGE": "1"}


def read(name: str) -> dict:
    file = HOME / name
    return json.loads(file.read_text()) if file.exists() else {}


def fault(command: str) -> None:
    """End as the test wants this subcommand to."""
    faults = read("faults.json")
    if not faults.get(command):
        return
    status, message = faults[command].pop(0) if isinstance(faults[command][0], list) else faults[command]
    (HOME / "faults.json").write_text(json.dumps(faults))
    print(message, file=sys.stderr)
    sys.exit(status)


def parser(command: str, flags: tuple[str, ...] = (), switches: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"docker {command}", allow_abbrev=False)
    for flag in flags:
        made.add_argument(flag, action="append", default=[])
    for switch in switches:
        made.add_argument(switch, action="store_true")
    return made


def run(arguments: list[str]) -> int:
    flags = ("--name", "--label", "--pull", "--network", "--ipc", "--ulimit", "--cap-add", "--gpus", "--device", "--volume")
    one = parser("run", (*flags, "--workdir", "--user", "--env", "--entrypoint"), ("--rm", "--init"))
    one.add_argument("image")
    one.add_argument("arguments", nargs=argparse.REMAINDER)
    given = one.parse_args(arguments)
    assert given.rm and given.init and given.pull == ["never"] and given.network == ["host"] and given.ipc == ["host"]
    if given.image not in read("images.json"):
        print(f"docker: Error response from daemon: No such image: {given.image}.", file=sys.stderr)
        return 125
    if given.gpus and not (HOME / "toolkit").exists():
        message = 'could not select device driver "" with capabilities: [[gpu]].'
        print(f"docker: Error response from daemon: {message}", file=sys.stderr)
        return 125
    name = given.name[0]
    request = {
        "argv": [given.entrypoint[0], *given.arguments],
        "env": {**IMAGE_ENVIRONMENT, **{each: os.environ[each] for each in given.env if each in os.environ}},
        "cwd": given.workdir[0],
        "label": given.label[0],
    }
    (HOME / f"{name}.new").write_text(json.dumps(request))
    (HOME / f"{name}.new").rename(HOME / f"{name}.container")
    pid, said, code = HOME / f"{name}.pid", HOME / f"{name}.out", HOME / f"{name}.code"
    signal.signal(signal.SIGTERM, lambda *_: os.kill(int(pid.read_text()), signal.SIGTERM))
    shown = 0
    while True:
        ended = code.exists()
        if said.exists() and len(text := said.read_bytes()) > shown:
            sys.stdout.buffer.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
        if ended:
            break
        if not (HOME / f"{name}.container").exists():
            return 137  # removed by force
        time.sleep(0.02)
    status = int(code.read_text())
    for file in HOME.glob(f"{name}.*"):
        file.unlink()
    return 128 - status if status < 0 else status


def serve() -> None:
    """Start what is asked for, as children of this process."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    while not (HOME / "end").exists():
        for file in HOME.glob("*.container"):
            if file.stem in running:
                continue
            request = json.loads(file.read_text())
            with (HOME / f"{file.stem}.out").open("wb") as out:
                try:
                    running[file.stem] = subprocess.Popen(
                        request["argv"], env=request["env"], cwd=request["cwd"], stdout=out, stderr=out, start_new_session=True
                    )
                except OSError:
                    out.write(f'exec: "{request["argv"][0]}": executable file not found in $PATH'.encode())
                    running[file.stem] = subprocess.Popen(["sh", "-c", "exit 127"])
            (HOME / f"{file.stem}.pid").write_text(str(running[file.stem].pid))
        for name, process in running.items():
            if process.poll() is not None and (HOME / f"{name}.container").exists():
                (HOME / f"{name}.code.new").write_text(str(process.returncode))
                (HOME / f"{name}.code.new").rename(HOME / f"{name}.code")
        time.sleep(0.02)
    for process in running.values():
        if process.poll() is None:
            process.kill()


def main() -> int:
    command, *arguments = sys.argv[1:]
    with (HOME / "log").open("a") as log:
        print(json.dumps([command, *arguments]), file=log)
    fault(command)
    if command == "run":
        return run(arguments)
    if command == "info":
        parser("info", ("--format",)).parse_args(arguments)
    elif command == "ps":
        given = parser("ps", ("--filter",), ("--all", "--quiet")).parse_args(arguments)
        label = given.filter[0].removeprefix("label=")
        for file in HOME.glob("*.container"):
            if json.loads(file.read_text())["label"] == label:
                print(file.stem)
    elif command == "inspect":
        one = parser("inspect", ("--format",))
        one.add_argument("name")
        given = one.parse_args(arguments)
        assert given.format == ["{{.State.Pid}}"]
        print((HOME / f"{given.name}.pid").read_text())
    elif command == "rm":
        one = parser("rm", (), ("--force",))
        one.add_argument("name")
        given = one.parse_args(arguments)
        pid = int((HOME / f"{given.name}.pid").read_text())
        subprocess.run(["pkill", "-KILL", "-s", str(pid)], check=False)  # the session of this one container
        for file in HOME.glob(f"{given.name}.*"):
            file.unlink()
    elif command == "image":
        one = parser("image inspect", ("--format",))
        one.add_argument("inspect", choices=["inspect"])
        one.add_argument("reference")
        given = one.parse_args(arguments)
        if given.reference not in read("images.json"):
            print(f"Error: No such image: {given.reference}", file=sys.stderr)
            return 1
        print(f"{given.reference.partition('@')[0]}@{read('images.json')[given.reference]}")
    elif command == "login":
        one = parser("login", ("--username",), ("--password-stdin",))
        one.add_argument("registry")
        given = one.parse_args(arguments)
        assert given.username == ["AWS"] and given.password_stdin
        if sys.stdin.read() != read("passwords.json").get(given.registry):
            print("Error response from daemon: login attempt failed with status: 400 Bad Request", file=sys.stderr)
            return 1
        Path(os.environ["DOCKER_CONFIG"], "config.json").write_text(given.registry)
    elif command == "pull":
        one = parser("pull", (), ("--quiet",))
        one.add_argument("reference")
        given = one.parse_args(arguments)
        registry = given.reference.partition("/")[0]
        config = Path(os.environ["DOCKER_CONFIG"], "config.json")
        if ".ecr." in registry and not (config.exists() and config.read_text() == registry):
            print("Error response from daemon: no basic auth credentials", file=sys.stderr)
            return 1
        if given.reference not in read("registry.json"):
            print(f"Error response from daemon: manifest for {given.reference} not found: manifest unknown", file=sys.stderr)
            return 1
        digest = read("registry.json")[given.reference]
        (HOME / "images.json").write_text(json.dumps({**read("images.json"), given.reference: digest}))
    else:
        print(f"docker: '{command}' is not a docker command.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        if os.fork() == 0:
            os.setsid()
            serve()
    else:
        sys.exit(main())
