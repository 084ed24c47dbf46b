#!/bin/sh
# Runs an MPI program across two hosts, which are two network namespaces joined by a cable.
#
#   two_hosts.sh FOLDER-OF-THE-PROVIDER PROGRAM [ARGUMENTS...]
#
# Two ranks run on each (RANKS_EACH says how many). Needs root and Open MPI, and says that it skipped
# the test where it may not make namespaces. Removes what it made, and nothing else.
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
    ip netns delete "$here" 2> /dev/null || true
    ip netns delete "$there" 2> /dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip netns add "$here" 2> /dev/null || skip "network namespaces are not permitted"
ip netns add "$there"
ip link add "mfh$$" netns "$here" type veth peer name "mft$$" netns "$there"
# Addresses that are kept for tests between hosts.
ip -n "$here" address add 198.18.0.1/24 dev "mfh$$"
ip -n "$there" address add 198.18.0.2/24 dev "mft$$"
for name in "$here" "$there"; do ip -n "$name" link set lo up; done
ip -n "$here" link set "mfh$$" up
ip -n "$there" link set "mft$$" up
# The kernel takes a moment to say that the cable is in, and nobody uses an interface before.
for name in "$here" "$there"; do
    tries=0
    until ip -n "$name" link show type veth | grep -q 'state UP' || [ $tries -ge 100 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
done

# What Open MPI starts its part on the other host with: a host's name, then a command.
cat > "$folder/agent" << AGENT
#!/bin/sh
shift
exec ip netns exec $there unshare --uts sh -c "hostname there; \$*"
AGENT
chmod +x "$folder/agent"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
timeout "${TIMEOUT:-300}" ip netns exec "$here" unshare --uts sh -c 'hostname here; exec "$@"' sh \
    "$mpirun" --host "198.18.0.1:$ranks,198.18.0.2:$ranks" -np $((2 * ranks)) \
    --oversubscribe --bind-to none \
    --mca plm_rsh_agent "$folder/agent" --mca oob_tcp_if_include 198.18.0.0/24 \
    --mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include memferry --mca btl ^ofi \
    -x FI_PROVIDER_PATH="$provider" ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} \
    ${FI_LOG_LEVEL:+-x FI_LOG_LEVEL} ${MEMFERRY_FABRIC_INTERFACE:+-x MEMFERRY_FABRIC_INTERFACE} \
    "$@"
