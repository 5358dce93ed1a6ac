# The rest of the user data: user_data.py puts the header before it, which defines
#   image_python               the image's Python
#   payload_sha256             digest of the payload's archive
#   run_json                   a function that prints the RunSpec document
#   payload_archive FILE       a function that writes the archive of the payload to FILE
# Needs bash, coreutils and the image's Python. May run again: what is there already stays.
set -euo pipefail
umask 022
began="$(date +%s.%N)"

root="${TRAINCLUSTER_ROOT:-}"
python="${TRAINCLUSTER_PYTHON:-$image_python}"
payload="$root/opt/traincluster/payload"
run="$root/etc/traincluster/run.json"

step="begin"
scratch=""
finish() {
  status=$?
  if [ "$status" -ne 0 ]; then
    echo "traincluster: the bootstrap failed in step '$step' (exit status $status)." >&2
    report_failure || echo "traincluster: this node stays as it is: the failure could not be reported." >&2
  fi
  [ -z "$scratch" ] || rm -rf "$scratch"
  exit "$status"
}
trap finish EXIT

# What trainrun.node.replacements does, without trainrun: the payload may be what failed. What is told here ends on the console.
report_failure() {
  [ "${AWS_EC2_METADATA_DISABLED:-}" != true ] && [ -x "$python" ] || return 1
  "$python" - "$run" "the bootstrap failed in step '$step': $(tail -n 5 "$scratch/said" 2>/dev/null || true)" <<'PYTHON'
import json, os, sys, time, urllib.request

run, reason = json.load(open(sys.argv[1])), sys.argv[2][:2000]
service = (os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254").rstrip("/") + "/latest/"
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def ask(path, method="GET", **headers):
    headers = {"X-aws-ec2-metadata-token" + name: value for name, value in headers.items()}
    return direct.open(urllib.request.Request(service + path, headers=headers, method=method), timeout=5).read().decode()

token = {"": ask("api/token", "PUT", **{"-ttl-seconds": "300"})}
node, address = (ask("meta-data/" + path, **token) for path in ("instance-id", "local-ipv4"))

import boto3

ready, word = run.get("readiness", {}), {"Status": "FAILURE", "UniqueId": node, "Reason": reason[:800], "Data": "bootstrap"}
try:
    if "url" in ready:
        word = json.dumps(word).encode()
        urllib.request.urlopen(urllib.request.Request(ready["url"], word, {"Content-Type": ""}, method="PUT"), timeout=10)
    elif ready:
        boto3.client("cloudformation", region_name=run["region"]).signal_resource(
            StackName=ready["stack"], LogicalResourceId=ready["resource"], UniqueId=node + "/bootstrap", Status="FAILURE"
        )
except Exception as error:
    print(f"traincluster: the stack was not told: {error}")

bucket, _, prefix = run["storage"]["location"].removeprefix("s3://").rstrip("/").partition("/")
folder = "/".join([prefix, run["run"], ""]).lstrip("/")
s3 = boto3.client("s3", region_name=run["region"])

def put(key, **what):
    what = json.dumps({"node": node, "time": round(time.time(), 3), **what}) + "\n"
    s3.put_object(Bucket=bucket, Key=folder + key, Body=what.encode())

put(f"nodes/{node}.jsonl", address=address, step="bootstrap", state="failed", seconds=0.0, detail=reason)
put(f"replacements/{node}.json", reason=reason)
pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=folder + "replacements/")
times = {one["Key"]: one["LastModified"].timestamp() for page in pages for one in page["Contents"]}
now = times[f"{folder}replacements/{node}.json"]
recent, allowed = sum(t > now - 86400 for t in times.values()), run.get("shutdown", {}).get("max_replacements", 5)
if recent > allowed:
    sys.exit(f"traincluster: {recent} nodes in 24 hours were not fit, {allowed} may be replaced. This node stays as it is.")
boto3.client("autoscaling", region_name=run["region"]).set_instance_health(
    InstanceId=node, HealthStatus="Unhealthy", ShouldRespectGracePeriod=False
)
print(f"traincluster: {node} is being replaced.")
PYTHON
}

# Runs a command, and keeps what it says of its failure for the report.
noting() {
  local status=0
  "$@" 2>"$scratch/said" || status=$?
  cat "$scratch/said" >&2
  return "$status"
}

unpack() {
  rm -rf "$scratch/payload"
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
}

step="find the image's Python"
[ -x "$python" ] || { echo "traincluster: $python is not an executable. Is this image one with torch?" >&2; exit 1; }

step="write run.json"
mkdir -p "$root/etc/traincluster" "$root/opt/traincluster" "$root/var/lib/traincluster" "$root/var/log/traincluster"
[ -e "$root/var/lib/traincluster/began" ] || echo "$began" >"$root/var/lib/traincluster/began"
scratch="$(mktemp -d "$root/opt/traincluster/bootstrap.XXXXXX")"
run_json >"$scratch/run.json"
mv "$scratch/run.json" "$run"

if [ "$(cat "$payload/.sha256" 2>/dev/null || true)" != "$payload_sha256" ]; then
  for attempt in 1 2 3; do  # again, if what came was torn on its way
    step="fetch the payload"
    noting payload_archive "$scratch/payload.tar.xz"
    step="check and unpack the payload"
    noting unpack && break
    [ "$attempt" -lt 3 ]
  done
  # Moved into place as a whole, so that a payload which is there is complete.
  rm -rf "$payload"
  mv "$scratch/payload" "$payload"
fi

step="start the node agent"
PYTHONPATH="$payload" noting "$python" -m trainrun.node start
