#!/bin/sh
# Runs an MPI program across two hosts, which are two network namespaces joined by a cable.
#
#   two_hosts.sh FOLDER-OF-THE-PROVIDER PROGRAM [ARGUMENTS...]
#
# RANKS_EACH ranks (default: two) run on each host, started by `mpirun` (or MPIRUN) of Open MPI 4 or
# 5 or of MPICH. With VANISHES=1 the program gets the names of two files: when it has created the
# first, the other host becomes unreachable, and the content of the second ends the test. The script
# needs root, and prints that the test is skipped if it may not create namespaces. It removes only
# what it created.
set -eu

skip() {
    echo "skipped: $*"
    exit 0
}

[ $# -ge 2 ] || { echo "usage: $0 FOLDER PROGRAM [ARGUMENTS...]" >&2; exit 2; }
provider=$(realpath "$1")
shift
ranks=${RANKS_EACH:-2}
mpirun=${MPIRUN:-mpirun}

[ "$(id -u)" = 0 ] || skip "only root can make network namespaces"
for tool in ip unshare "$mpirun"; do
    command -v "$tool" > /dev/null || skip "$tool is not installed"
done

here=mfy-here-$$ there=mfy-there-$$
folder=$(mktemp -d)
cleanup() {
    for name in "$here" "$there"; do
        # Kills only processes in the namespaces of this script.
        for process in $(ip netns pids "$name" 2> /dev/null); do kill -KILL "$process" || true; done
    done
    ip netns delete "$here" 2> /dev/null || true
    ip netns delete "$there" 2> /dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip netns add "$here" 2> /dev/null || skip "network namespaces are not permitted"
ip netns add "$there"
ip link add "mfh$$" netns "$here" type veth peer name "mft$$" netns "$there"
# Addresses that are reserved for tests between hosts.
ip -n "$here" address add 198.18.0.1/24 dev "mfh$$"
ip -n "$there" address add 198.18.0.2/24 dev "mft$$"
for name in "$here" "$there"; do ip -n "$name" link set lo up; done
ip -n "$here" link set "mfh$$" up
ip -n "$there" link set "mft$$" up
# The kernel reports the link with a delay, and an interface cannot be used before that.
for name in "$here" "$there"; do
    tries=0
    until ip -n "$name" link show type veth | grep -q 'state UP' || [ $tries -ge 100 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
done

# The agent by which a launcher starts its part on the other host: options, a host name, then a
# command.
cat > "$folder/agent" << AGENT
#!/bin/sh
while case \$1 in -*) true ;; *) false ;; esac; do shift; done
shift
exec ip netns exec $there unshare --uts sh -c "hostname there; \$*"
AGENT
chmod +x "$folder/agent"

on_here() {
    timeout "${TIMEOUT:-300}" ip netns exec "$here" unshare --uts \
        sh -c 'hostname here; exec "$@"' sh "$@"
}

# Waits until file $1 exists, at most $2 seconds.
await() {
    tries=0
    until [ -e "$1" ]; do
        [ $tries -lt $(($2 * 10)) ] || { echo "$1 did not come within $2 seconds" >&2; return 1; }
        tries=$((tries + 1))
        sleep 0.1
    done
}

# The launcher does not survive the loss of a host: it is killed with all its processes.
run_vanishing() {
    "$@" "$folder/ready" "$folder/ended" &
    await "$folder/ready" 120
    ip -n "$there" link set "mft$$" down
    await "$folder/ended" 120
    cat "$folder/ended"
}

run_all() {
    if [ "${VANISHES:-0}" = 1 ]; then run_vanishing on_here "$@"; else on_here "$@"; fi
}

export FI_PROVIDER_PATH="$provider"
hosts="198.18.0.1:$ranks,198.18.0.2:$ranks"
all=$((2 * ranks))
if "$mpirun" --version 2>&1 | grep -q HYDRA; then
    export FI_PROVIDER=memferry MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_NOLOCAL=1
    run_all "$mpirun" -launcher ssh -launcher-exec "$folder/agent" -iface "mfh$$" \
        -hosts "$hosts" -n "$all" "$@"
else
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export OMPI_MCA_plm_rsh_agent="$folder/agent" PRTE_MCA_plm_ssh_agent="$folder/agent"
    export OMPI_MCA_oob_tcp_if_include=198.18.0.0/24 PRTE_MCA_prte_if_include=198.18.0.0/24
    run_all "$mpirun" --host "$hosts" -np "$all" --oversubscribe --bind-to none \
        --mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include memferry --mca btl ^ofi \
        -x FI_PROVIDER_PATH ${FI_LOG_LEVEL:+-x FI_LOG_LEVEL} \
        ${MEMFERRY_FABRIC_INTERFACE:+-x MEMFERRY_FABRIC_INTERFACE} "$@"
fi
