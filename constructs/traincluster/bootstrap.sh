# The rest of the user data: user_data.py puts the header before it, which defines
#   image_python               the image's Python
#   payload_sha256             digest of the payload's archive
#   run_json                   a function that prints the RunSpec document
#   payload_archive FILE       a function that writes the archive of the payload to FILE
# Needs bash, coreutils and the image's Python. May run again: what is there already stays.
set -euo pipefail
umask 022

root="${TRAINCLUSTER_ROOT:-}"
python="${TRAINCLUSTER_PYTHON:-$image_python}"
payload="$root/opt/traincluster/payload"

step="begin"
scratch=""
finish() {
  status=$?
  [ -z "$scratch" ] || rm -rf "$scratch"
  [ "$status" -eq 0 ] || echo "traincluster: the bootstrap failed in step '$step' (exit status $status)." >&2
  exit "$status"
}
trap finish EXIT

step="find the image's Python"
[ -x "$python" ] || { echo "traincluster: $python is not an executable. Is this image one with torch?" >&2; exit 1; }

step="write run.json"
mkdir -p "$root/etc/traincluster" "$root/opt/traincluster" "$root/var/lib/traincluster" "$root/var/log/traincluster"
scratch="$(mktemp -d "$root/opt/traincluster/bootstrap.XXXXXX")"
run_json >"$scratch/run.json"
mv "$scratch/run.json" "$root/etc/traincluster/run.json"

if [ "$(cat "$payload/.sha256" 2>/dev/null || true)" != "$payload_sha256" ]; then
  step="fetch the payload"
  payload_archive "$scratch/payload.tar.xz"

  step="check and unpack the payload"
  "$python" - "$scratch/payload.tar.xz" "$payload_sha256" "$scratch/payload" <<'PYTHON'
import hashlib, pathlib, sys, tarfile

archive, wanted, target = sys.argv[1:]
found = hashlib.sha256(pathlib.Path(archive).read_bytes()).hexdigest()
if found != wanted:
    sys.exit(f"traincluster: the payload has sha256 {found}, not {wanted}. Nothing of it was unpacked.")
with tarfile.open(archive) as members:
    members.extractall(target, filter="data")
pathlib.Path(target, ".sha256").write_text(wanted)
PYTHON
  # Moved into place as a whole, so that a payload which is there is complete.
  rm -rf "$payload"
  mv "$scratch/payload" "$payload"
fi

step="start the node agent"
PYTHONPATH="$payload" "$python" -m trainrun.node start
