"""A deployment outlives its parts: their files, keys, weights, and a start that hangs."""

import contextlib
import os
import shutil
import signal
import subprocess

import command
import httpx
import pytest
import stores
from deployment import Deployment, all_ready, deployed, needs_haproxy

from lmchat import bundled

pytestmark = needs_haproxy

KEYS = ["ann:first-key-0123456789", "ann:second-key-0123456789"]


def headers(key):
    return {"Authorization": f"Bearer {key.partition(':')[2]}"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with a model "v1", the same with other weights "v2", and a link to v1."""
    folder = tmp_path_factory.mktemp("models")
    for version in ("v1", "v2"):
        shutil.copytree(bundled.FOLDER, folder / version)
    with open(folder / "v2" / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    (folder / "current").symlink_to("v1")
    (folder / "keys").write_text(KEYS[0])
    (folder / "keys").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def deployment(folders):
    options = ["--replicas=2", f"--api-keys={folders / 'keys'}"]
    with (
        stores.folder() as home,
        deployed(home, *options, model=folders / "current", headers=headers(KEYS[0])) as found,
    ):
        yield found


def models(deployment):
    """Returns the list of models, once HAProxy has found a replica again."""
    while True:
        with contextlib.suppress(httpx.HTTPError), deployment.client() as client:
            answer = client.get("/v1/models")
            if answer.status_code != 503:
                return answer.json()["data"]


def kill(deployment, number):
    os.kill(deployment.status()["replicas"][number - 1]["pid"], signal.SIGKILL)


def restarts(deployment):
    return [replica["restarts"] for replica in deployment.status()["replicas"]]


def test_a_folder_that_was_emptied_is_filled_again(deployment):
    """No process ends for that, and a proxy that ends then is started again."""
    folder = deployment.folder
    before = restarts(deployment)
    shutil.rmtree(folder)
    (deployment.home / "deployment").unlink()
    names = {"control", "replica-1", "replica-2"}
    while not (folder.exists() and names <= set(os.listdir(folder))):
        pass
    deployment.wait(all_ready)
    (model,) = models(deployment)
    assert model["id"] == deployment.status()["model"] == "current"
    assert restarts(deployment) == before
    children = f"/proc/{deployment.process.pid}/task/{deployment.process.pid}/children"
    with open(children) as file:
        pids = [int(pid) for pid in file.read().split()]
    for pid in pids:
        with open(f"/proc/{pid}/comm") as file:
            if file.read().strip() == "haproxy":
                os.kill(pid, signal.SIGKILL)
    while "haproxy.cfg" not in os.listdir(folder):
        pass
    assert models(deployment) == [model]


def test_the_status_is_known_after_keys_were_rotated(deployment, folders):
    (folders / "keys").write_text(KEYS[1])
    kill(deployment, 2)
    found = deployment.wait(lambda replicas: replicas[1]["restarts"] and all_ready(replicas))
    assert [replica["running"] for replica in found["replicas"]] == [0, 0]


def test_other_weights_wait_for_an_update(deployment, folders):
    (folders / "current").unlink()
    (folders / "current").symlink_to("v2")
    count = restarts(deployment)[0]
    kill(deployment, 1)
    deployment.wait(lambda replicas: replicas[0]["restarts"] >= count + 2)
    states = [replica["state"] for replica in deployment.status()["replicas"]]
    assert states[0] != "ready"
    assert states[1] == "ready"
    deployment.restart()
    deployment.wait(all_ready)


def test_one_replica_is_enough_to_open(data_dir):
    """The other one is stopped while it starts; the deployment ends all the same."""
    with subprocess.Popen(
        [*command.LMCHAT, "deploy", "memo", "--port=0", "--replicas=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=command.ENVIRONMENT | {"LMCHAT_HOME": str(data_dir)},
    ) as process:
        deployment = Deployment(process, "", data_dir)
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        pids = []
        while len(pids) < 2:
            with open(children) as file:
                pids = [int(pid) for pid in file.read().split()]
        os.kill(pids[0], signal.SIGSTOP)
        assert " at http://" in process.stdout.readline()
        one, two = deployment.status()["replicas"]
        assert (one["pid"], one["state"], one["running"]) == (pids[0], "starting", None)
        assert two["state"] == "ready"
        os.kill(pids[0], signal.SIGCONT)
        deployment.stop()
        assert process.wait(60) == 0
