#!/bin/sh
# mpi_links.sh NODES GBIT [mpirun's options] PROGRAM ARGUMENTS...: a program under Open MPI, one rank on each of
# NODES network namespaces, which are joined by a bridge in one more. Every node's cable (a pair of veth
# devices) is limited to GBIT in both directions; the limit counts whole frames. Namespaces and devices are gone
# when it returns. Needs root; 77: not possible here, with a sentence that says why.
#   QUEUE=fair    packets for each peer in a queue of their own, short ones (acknowledgements) first: what
#                 fq_codel, the default of Linux distributions, does to such traffic
#   QUEUE=fifo    one queue: a token bucket, as a cheap switch would
nodes=$1 gbit=$2; shift 2
skip() { echo "mpi_links.sh: $1" >&2; exit 77; }
[ "$(id -u)" -eq 0 ] || skip "network namespaces need root"
for tool in ip tc unshare mpirun.openmpi; do command -v $tool >/dev/null || skip "$tool is not installed"; done
name=dtlinks$$ folder=$(mktemp -d) || exit 1
clean() {
    for i in $(seq 1 "$nodes") hub; do ip netns del $name-$i 2>/dev/null; done
    rm -r "$folder"
}
trap clean EXIT
trap 'exit 1' INT TERM HUP

kbit=$(awk "BEGIN { printf \"%.0f\", 1e6 * $gbit }")
burst=$((kbit > 500000 ? 64 : 16))kb
class() { # class "ip netns exec X" DEVICE ID KBIT PRIORITY
    $1 tc class add dev $2 parent 1:1 classid 1:$3 htb rate $4kbit ceil ${kbit}kbit prio $5 burst 4kb cburst 4kb quantum 3028
}
shape() { # shape "ip netns exec X" DEVICE src|dst: which address is the peer's
    if [ "$QUEUE" = fifo ]; then $1 tc qdisc add dev $2 root tbf rate ${kbit}kbit burst $burst limit 16mb; return; fi
    $1 tc qdisc add dev $2 root handle 1: htb default 99 &&
        $1 tc class add dev $2 parent 1: classid 1:1 htb rate ${kbit}kbit burst $burst cburst $burst quantum 3028 &&
        class "$1" $2 98 $((kbit / 10)) 0 && class "$1" $2 99 $((kbit / 10)) 1 &&
        $1 tc filter add dev $2 parent 1: protocol ip prio 1 u32 match u16 0 0xff80 at 2 flowid 1:98 || return
    for p in $(seq 1 "$nodes"); do
        class "$1" $2 1$p $((kbit * 8 / 10 / nodes)) 1 && $1 tc qdisc add dev $2 parent 1:1$p bfifo limit 16mb &&
            $1 tc filter add dev $2 parent 1: protocol ip prio 2 u32 match ip $3 10.77.0.$p/32 flowid 1:1$p || return
    done
}

ip netns add $name-hub 2>/dev/null || skip "no network namespaces here"
hub="ip netns exec $name-hub" hosts=
$hub ip link add eth0 type bridge && $hub ip addr add 10.77.0.254/24 dev eth0 && $hub ip link set eth0 up || skip "no bridges here"
for i in $(seq 1 "$nodes"); do
    ip netns add $name-$i && ip link add eth0 netns $name-$i type veth peer name port$i netns $name-hub || skip "no veth devices here"
    node="ip netns exec $name-$i"
    $node ip link set lo up && $node ip addr add 10.77.0.$i/24 dev eth0 && $node ip link set eth0 up &&
        $hub ip link set port$i master eth0 up || skip "the interfaces of node $i could not be started"
    shape "$node" eth0 dst 2>"$folder/said" && shape "$hub" port$i src 2>"$folder/said" ||
        skip "this kernel cannot limit an interface's rate so: $(head -n 1 "$folder/said")"
    hosts=$hosts${hosts:+,}10.77.0.$i:1
done
# What mpirun calls instead of ssh: HOST COMMAND... Hosts are told apart by their names, too.
cat >"$folder/agent" <<END
#!/bin/sh
i=\${1##*.}; shift
exec ip netns exec $name-\$i unshare -u sh -c "hostname links\$i; \$*"
END
chmod +x "$folder/agent"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
$hub mpirun.openmpi -n "$nodes" --host $hosts --mca plm_rsh_agent "$folder/agent" --mca pml ob1 --mca btl tcp,self \
    --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --mca mpi_yield_when_idle 1 "$@"
