"""A small driver, run by tests as a process of its own: `driver_script.py once|stay|raise|hang [log_dir]`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from flowrl.signals import Stopped, stop_signals
from flowrl.single_controller import Cluster, ResourcePool, WorkerGroup
from flowrl.single_controller.ray_private import pids_of_own_ray

sys.path.insert(0, str(Path(__file__).parent))

from roles import Echo  # noqa: E402


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]


def main(mode: str) -> None:
    with stop_signals(), Cluster() as cluster, ResourcePool(cluster, devices=2, cpus_per_device=0.1) as pool:
        say(cluster.banner)
        echo = WorkerGroup.spawn(pool, Echo)
        say(f"sum {echo.world_sum(1.0)}")
        if mode == "hang":
            os.kill(next(pid for pid in pids_of_own_ray() if "gcs_server" in command(pid)), signal.SIGSTOP)
        if mode in ("raise", "hang"):
            raise ValueError("the driver fails")
        if mode == "stay":
            echo.sleep(120)
            cluster.wait()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
