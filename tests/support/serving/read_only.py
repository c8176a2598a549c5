"""Commands whose file systems are all read-only but for one folder, as containers have them."""

import subprocess

import pytest

_SCRIPT = """
set -e
mount --make-rprivate /
mount --bind "$0" "$0"
while read -r _ point _; do
  case "$point" in
    "$0" | /proc | /proc/* | /sys | /sys/* | /dev | /dev/pts | /dev/mqueue) ;;
    *) mount -o remount,bind,ro "$point" ;;
  esac
done < <(cat /proc/self/mounts)
for folder in /tmp /var/tmp /dev/shm; do
  ! touch "$folder/written" 2> /dev/null
done
exec "$@"
"""


def read_only_but(folder):
    """Returns what a command begins with that can write in `folder` alone, or skips the test."""
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", _SCRIPT, str(folder)]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        pytest.skip(f"needs a namespace with read-only mounts ({why})")
    return prefix
