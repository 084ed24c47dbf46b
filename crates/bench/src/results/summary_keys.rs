//! The meaning of the numbers in a summary: which direction is better, the target, and one sentence
//! for the reader. A key that is not listed is shown without target and meaning.

use crate::results::number;
use crate::results::outcome::Disturbance;

/// The direction in which a number improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Higher is better.
    Higher,
    /// Lower is better.
    Lower,
}

impl Better {
    /// The direction in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Higher => "higher is better",
            Self::Lower => "lower is better",
        }
    }

    /// The direction as an arrow.
    pub fn arrow(self) -> &'static str {
        match self {
            Self::Higher => "↑",
            Self::Lower => "↓",
        }
    }
}

/// One known key of one bench.
#[derive(Debug, Clone, Copy)]
pub struct SummaryKey {
    /// The bench that reports the key.
    pub bench: &'static str,
    /// The name of the key in the summary.
    pub key: &'static str,
    /// `ratio`, `share` (0 to 1), `ns`, or the name of what is counted.
    pub unit: &'static str,
    /// The direction in which the number improves.
    pub better: Better,
    /// The target, if the key has one.
    pub target: Option<f64>,
    /// The target on a machine of [`MANY_CORES`] and more, if it is another one.
    pub many_cores_target: Option<f64>,
    /// The meaning, in one sentence for the reader.
    pub meaning: &'static str,
    /// Whether the number is a count, which does not depend on the load of the machine.
    pub is_counted: bool,
}

impl SummaryKey {
    /// Marks the number as a count, which does not depend on the load of the machine.
    const fn counted(mut self) -> Self {
        self.is_counted = true;
        self
    }

    /// Sets another target for machines of [`MANY_CORES`] and more.
    const fn on_many_cores(mut self, target: f64) -> Self {
        self.many_cores_target = Some(target);
        self
    }

    /// The target on a machine of so many cores, if the key has one.
    pub fn target_on(&self, cores: usize) -> Option<f64> {
        self.many_cores_target.filter(|_| cores >= MANY_CORES).or(self.target)
    }
}

/// The number of cores from which on a machine has the targets of large ones: a cache line takes longer between
/// its cores, and a peer that uses all of them is faster.
pub const MANY_CORES: usize = 8;

/// Whether a number reaches its target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TargetStatus {
    /// The number reaches the target.
    Reached,
    /// The number misses the target, or was not measured.
    Missed,
    /// The run was disturbed, so the number is not compared with the target.
    NotJudged(Disturbance),
    /// The key has no target.
    NoTarget,
}

impl TargetStatus {
    /// The status as a mark with a word; empty without a target.
    pub fn text(self) -> &'static str {
        match self {
            Self::Reached => "✓ reached",
            Self::Missed => "✗ missed",
            Self::NotJudged(Disturbance::Busy(_)) => "not judged: the machine was busy",
            Self::NotJudged(Disturbance::Throttled(_)) => "not judged: a CPU quota throttled",
            Self::NoTarget => "",
        }
    }
}

/// A number of a summary, ready for display.
#[derive(Debug, Clone)]
pub struct KeyResult {
    /// The number with its unit.
    pub value: String,
    /// The target with its relation, such as `≥ 2×`; empty without one.
    pub target: String,
    /// Whether the number reaches the target.
    pub status: TargetStatus,
    /// The direction in which the number improves, if it is known.
    pub better: Option<Better>,
    /// The meaning, in one sentence; empty for an unknown key.
    pub meaning: &'static str,
}

/// [`judge_on`] a machine of few cores.
pub fn judge(bench: &str, key: &str, value: f64, disturbance: Option<Disturbance>) -> KeyResult {
    judge_on(1, bench, key, value, disturbance)
}

/// Finds a key and compares its number with the target for a machine of so many cores. Times of a
/// disturbed run are not judged.
pub fn judge_on(
    cores: usize,
    bench: &str,
    key: &str,
    value: f64,
    disturbance: Option<Disturbance>,
) -> KeyResult {
    let Some(known) = KEYS.iter().find(|known| known.bench == bench && known.key == key) else {
        let unit = if key.ends_with("_ns") { "ns" } else { "" };
        return KeyResult {
            value: with_unit(value, unit),
            target: String::new(),
            status: TargetStatus::NoTarget,
            better: None,
            meaning: "",
        };
    };
    let (bar, mark) = match (known.target_on(cores), known.better) {
        (None, _) => (String::new(), TargetStatus::NoTarget),
        (Some(bar), Better::Higher) => (target_text("≥", bar, known.unit), reached(value >= bar)),
        (Some(bar), Better::Lower) => (target_text("≤", bar, known.unit), reached(value <= bar)),
    };
    let mark = match (mark, disturbance) {
        (TargetStatus::Reached | TargetStatus::Missed, Some(why)) if !known.is_counted => {
            TargetStatus::NotJudged(why)
        }
        (mark, _) => mark,
    };
    KeyResult {
        value: with_unit(value, known.unit),
        target: bar,
        status: mark,
        better: Some(known.better),
        meaning: known.meaning,
    }
}

fn reached(yes: bool) -> TargetStatus {
    if yes { TargetStatus::Reached } else { TargetStatus::Missed }
}

fn with_unit(value: f64, unit: &str) -> String {
    if unit == "share" { number::short(value) } else { number::with_unit(value, unit) }
}

fn target_text(relation: &str, bar: f64, unit: &str) -> String {
    match unit {
        "ratio" => format!("{relation} {bar}×"),
        "ns" => format!("{relation} {bar} ns"),
        _ => format!("{relation} {bar}"),
    }
}

const fn ratio(
    bench: &'static str,
    key: &'static str,
    bar: Option<f64>,
    meaning: &'static str,
) -> SummaryKey {
    SummaryKey { better: Better::Higher, ..cost(bench, key, "ratio", bar, meaning) }
}

const fn share(
    bench: &'static str,
    key: &'static str,
    bar: Option<f64>,
    meaning: &'static str,
) -> SummaryKey {
    SummaryKey { unit: "share", ..ratio(bench, key, bar, meaning) }
}

const fn cost(
    bench: &'static str,
    key: &'static str,
    unit: &'static str,
    bar: Option<f64>,
    meaning: &'static str,
) -> SummaryKey {
    SummaryKey {
        bench,
        key,
        unit,
        better: Better::Lower,
        target: bar,
        many_cores_target: None,
        meaning,
        is_counted: false,
    }
}

const LATENCY: &str = "copy-latency";
const BANDWIDTH: &str = "copy-bandwidth";
const OVERLAP: &str = "overlap";
const OVERHEAD: &str = "overhead";
const POLLUTION: &str = "pollution";
const IPC: &str = "ipc";
const PINGPONG: &str = "pingpong";
const ALLTOALL: &str = "alltoall";
const COLLECTIVES: &str = "collectives";
const RECEIVE: &str = "receive-overhead";
const MATCHING: &str = "matching";
const SCALE: &str = "scale";
const PINNING: &str = "pinning";
const LOOKUP: &str = "lookup";
const GPU: &str = "gpu";
const LOAD: &str = "load";
const DEVICES: &str = "devices";
const APPS: &str = "apps";
const UNMODIFIED: &str = "unmodified";

/// All known keys, grouped by bench.
#[rustfmt::skip]
pub static KEYS: &[SummaryKey] = &[
    ratio(LATENCY, "hot_4k_vs_memcpy", None, "Speed of one 4 KiB copy between cached buffers, against memcpy."),
    ratio(LATENCY, "hot_64k_vs_memcpy", None, "Speed of one 64 KiB copy between cached buffers, against memcpy."),
    ratio(LATENCY, "hot_1m_vs_memcpy", None, "Speed of one 1 MiB copy between cached buffers, against memcpy."),
    ratio(LATENCY, "cold_4m_vs_memcpy", None, "Speed of one 4 MiB copy between buffers outside the caches, against memcpy."),
    ratio(LATENCY, "hot_4m_vs_memcpy", Some(2.0), "Speed of one 4 MiB copy between buffers used just before, against memcpy."),
    ratio(LATENCY, "hot_64m_vs_memcpy", Some(2.5), "Speed of one 64 MiB copy between buffers used just before, against memcpy."),
    ratio(LATENCY, "hot_256m_vs_memcpy", Some(1.5), "Speed of one 256 MiB copy between buffers used just before, against memcpy."),
    ratio(LATENCY, "worst_small_vs_memcpy", Some(0.95), "The smallest ratio over all sizes from 8 B to 1 MiB: what small copies lose at worst."),
    ratio(LATENCY, "beside_load_worst_vs_memcpy", Some(0.95), "The smallest ratio of copies between cached buffers while one or two other programs keep cores busy."),

    ratio(BANDWIDTH, "cold_64k_vs_memcpy", None, "Throughput of many 64 KiB copies outside the caches, against memcpy."),
    ratio(BANDWIDTH, "cold_64k_vs_rayon", Some(1.05), "Throughput of many 64 KiB copies outside the caches, against memcpy spread over rayon.").on_many_cores(1.0),
    ratio(BANDWIDTH, "worst_vs_memcpy", Some(0.97), "The smallest ratio over all measured sizes of a window of copies."),
    ratio(BANDWIDTH, "worst_vs_rayon", Some(1.0), "The smallest ratio over all measured sizes of a window of copies, against memcpy spread over rayon."),
    ratio(BANDWIDTH, "cold_4m_vs_memcpy", Some(2.0), "Throughput of many 4 MiB copies outside the caches, against memcpy."),
    ratio(BANDWIDTH, "cold_4m_vs_rayon", None, "Throughput of many 4 MiB copies outside the caches, against memcpy spread over rayon."),

    share(OVERLAP, "hot_64k", Some(0.92), "Share of a hot 64 KiB copy that hides behind the caller's own work.").on_many_cores(0.90),
    share(OVERLAP, "hot_1m", None, "Share of a hot 1 MiB copy that hides behind the caller's own work."),
    share(OVERLAP, "hot_4m", Some(0.97), "Share of a hot 4 MiB copy that hides behind the caller's own work."),
    share(OVERLAP, "cold_4m", Some(0.97), "Share of a cold 4 MiB copy that hides behind the caller's own work."),

    cost(OVERHEAD, "submit_ns", "ns", Some(100.0), "Time the caller spends to hand over the smallest copy to a channel that is awake."),
    cost(OVERHEAD, "submit_64k_ns", "ns", Some(200.0), "Time the caller spends to start a copy of 64 KiB, the largest that is one descriptor, by a channel that is awake.").on_many_cores(300.0),
    cost(OVERHEAD, "submit_many_ns", "ns", Some(30.0), "Time the caller spends for each of 64 copies of 8 bytes that one call hands over to a channel that is awake."),
    cost(OVERHEAD, "check_ns", "ns", None, "Time the caller spends to ask a copy that goes on whether it is done."),
    cost(OVERHEAD, "roundtrip_8b_ns", "ns", None, "Time from handing over a copy of 8 bytes to seeing it done."),
    cost(OVERHEAD, "floor_roundtrip_ns", "ns", None, "Time two cache lines take, one to another core and one back: what a hand-over by shared memory takes at least."),
    cost(OVERHEAD, "roundtrip_vs_floor", "ratio", Some(1.4), "The 8-byte round trip as a multiple of that floor."),

    cost(POLLUTION, "memcpy_slowdown", "ratio", None, "How much slower a warm buffer is read after memcpy than after a pause as long."),
    cost(POLLUTION, "ours_slowdown", "ratio", Some(1.03), "The same after a copy of ours that spares the caller's core."),
    cost(POLLUTION, "handover_slowdown", "ratio", None, "The same after a copy of one line by a channel and a pause: what the submission, the wake-up and the completion leave."),
    cost(POLLUTION, "neighbour_stream_slowdown", "ratio", None, "The same after a copy by a thread on another core with streaming stores, without a ferry."),
    cost(POLLUTION, "neighbour_memcpy_slowdown", "ratio", None, "The same after a copy by such a thread with memcpy."),
    cost(POLLUTION, "ours_slowdown_vs_at_once", "ratio", None, "The same against a read without any pause."),
    cost(POLLUTION, "ours_helping_slowdown", "ratio", None, "The same after an ordinary blocking copy of ours, with which the caller helps."),

    ratio(IPC, "4m_vs_cma", None, "Speed of a message of 4 MiB (half of a round trip), against one copy by the receiver with process_vm_readv."),
    ratio(IPC, "4m_vs_shm", None, "Speed of a message of 4 MiB (half of a round trip), against two pipelined copies through shared memory."),
    ratio(IPC, "4m_vs_loopback", None, "Speed of a message of 4 MiB (half of a round trip), against TCP over the loopback interface."),

    cost(PINGPONG, "floor_ns", "ns", None, "Time a cache line takes from core to core, with a line for each direction: what the simplest message takes."),
    cost(PINGPONG, "8b_vs_floor", "ratio", Some(1.25), "A message of 8 bytes as a multiple of that floor."),
    ratio(PINGPONG, "8b_vs_best", Some(1.0), "Speed of a message of 8 bytes, against the fastest peer."),
    ratio(PINGPONG, "64k_vs_best", Some(1.2), "Speed of a message of 64 KiB, against the fastest peer."),
    ratio(PINGPONG, "1m_vs_best", None, "Speed of a message of 1 MiB, against the fastest peer."),
    ratio(PINGPONG, "4m_vs_best", Some(1.6), "Speed of a message of 4 MiB, against the fastest peer."),
    ratio(PINGPONG, "64m_vs_best", Some(2.0), "Speed of a message of 64 MiB, against the fastest peer."),
    ratio(PINGPONG, "worst_vs_best", Some(0.95), "The smallest ratio over all measured sizes of a message."),
    ratio(PINGPONG, "4m_shareable_vs_best", Some(2.0), "Speed of a message of 4 MiB from and to memory that both processes map, against the fastest peer."),
    ratio(PINGPONG, "mpi_8b_vs_own", Some(1.0), "Speed of a message of 8 bytes of Open MPI over Memferry, against Open MPI's own transport."),
    ratio(PINGPONG, "mpi_64k_vs_own", Some(1.1), "Speed of a message of 64 KiB of Open MPI over Memferry, against Open MPI's own transport."),
    ratio(PINGPONG, "mpi_4m_vs_own", Some(1.5), "Speed of a message of 4 MiB of Open MPI over Memferry, against Open MPI's own transport."),
    ratio(PINGPONG, "mpi_64m_vs_own", Some(1.8), "Speed of a message of 64 MiB of Open MPI over Memferry, against Open MPI's own transport."),

    ratio(ALLTOALL, "np2_64k_vs_best", None, "Speed of an exchange of 64 KiB from each to each of 2 processes, against the faster MPI."),
    ratio(ALLTOALL, "np2_1m_vs_best", None, "Speed of an exchange of 1 MiB from each to each of 2 processes, against the faster MPI."),
    ratio(ALLTOALL, "np4_64k_vs_best", Some(1.2), "Speed of an exchange of 64 KiB from each to each of 4 processes, against the faster MPI."),
    ratio(ALLTOALL, "np4_1m_vs_best", None, "Speed of an exchange of 1 MiB from each to each of 4 processes, against the faster MPI."),
    ratio(ALLTOALL, "mpi_np2_1m_vs_own", None, "Speed of an exchange of 1 MiB from each to each of 2 processes by Open MPI over Memferry, against Open MPI's own transport."),
    ratio(ALLTOALL, "mpi_np4_64k_vs_own", None, "Speed of an exchange of 64 KiB from each to each of 4 processes by Open MPI over Memferry, against Open MPI's own transport."),

    ratio(COLLECTIVES, "barrier_np4_vs_best", Some(1.2), "Speed of a barrier of 4 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "allreduce_8b_np4_vs_best", Some(1.2), "Speed of a sum of one double of 4 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "allreduce_1m_np4_vs_best", Some(1.2), "Speed of a sum of 1 MiB of doubles of 4 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "bcast_1m_np4_vs_best", Some(1.2), "Speed of a broadcast of 1 MiB of 4 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "alltoall_64k_np4_vs_best", Some(1.2), "Speed of an exchange of 64 KiB from each to each of 4 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "barrier_np16_vs_best", Some(1.2), "Speed of a barrier of 16 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "allreduce_8b_np16_vs_best", Some(1.2), "Speed of a sum of one double of 16 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "allreduce_1m_np16_vs_best", Some(1.2), "Speed of a sum of 1 MiB of doubles of 16 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "bcast_1m_np16_vs_best", Some(1.2), "Speed of a broadcast of 1 MiB of 16 processes, against the fastest MPI."),
    ratio(COLLECTIVES, "alltoall_64k_np16_vs_best", Some(1.2), "Speed of an exchange of 64 KiB from each to each of 16 processes, against the fastest MPI."),

    share(RECEIVE, "overhead_reduction", Some(0.35), "Share of the compute time lost to naive receiving of cold 1 MiB messages that the best way to receive ahead gives back (paper: 0.42)."),
    share(RECEIVE, "overhead_reduction_hot", None, "The same with messages in few places, which stay in the caches (paper: 0.31)."),
    share(RECEIVE, "overhead_worst_reduction", Some(0.0), "The smallest such share over all sizes of messages from 16 KiB, in few places and in many."),
    ratio(RECEIVE, "packets_hot_worst_gain", Some(1.0), "Compute time lost to messages in packets that are copied by memcpy, against those that are delivered: the smallest ratio over all sizes from 16 KiB, with packets in the caches."),
    ratio(RECEIVE, "packets_cold_worst_gain", Some(1.0), "The same with packets in no cache."),

    cost(MATCHING, "depth_10k_vs_depth_1", "ratio", Some(3.0), "Cost of a message while 10,000 receives or messages wait, against one, in the worst of seven orders."),
    ratio(MATCHING, "depth_10k_vs_best", None, "Speed of a message while 10,000 receives or messages wait, in the worst of seven orders, against the best MPI."),

    cost(SCALE, "start_128_ms", "ms", Some(1000.0), "Time from the start of the first of 128 processes until all have joined the job."),
    cost(SCALE, "rss_per_rank_128_mib", "MiB", Some(8.0), "Resident memory of each of 128 processes that are all connected with each other, on average, pages of the program and pages shared with others included."),
    cost(SCALE, "idle_cpu_share_128", "share", Some(0.02), "Processor time of 128 connected processes that wait in a receive, as a share of the whole machine's."),
    ratio(SCALE, "ring_128_vs_best", Some(1.5), "Speed of a message of 8 bytes around 128 processes, against the faster MPI."),

    cost(LOOKUP, "hit_ns", "ns", Some(12.0), "Time to find a translation that is in the cache and to let it go again, from one thread."),
    share(LOOKUP, "memory_saving", Some(0.8), "Share of the full table's bytes that the cache does not take, for the program with the largest windows.").counted(),
    ratio(LOOKUP, "put_8b_vs_full", None, "Speed of a put of 8 bytes through the cache without misses, against the full table."),
    ratio(LOOKUP, "put_64k_vs_full", None, "The same for 64 KiB."),
    cost(LOOKUP, "worst_slowdown", "ratio", Some(1.25), "Longest time of a program with the cache as a multiple of its time with the full table, over all programs."),
    cost(LOOKUP, "median_slowdown", "ratio", Some(1.03), "The same for the program in the middle."),
    cost(LOOKUP, "worst_first_slowdown", "ratio", None, "The worst of the first runs, which begin with nothing attached and nothing in the cache."),
    cost(LOOKUP, "median_first_slowdown", "ratio", Some(1.05), "The same for the program in the middle."),

    ratio(PINNING, "overlapped_vs_whole_fresh", None, "Speed of a 4 MiB copy by a device into a fresh buffer that is pinned in growing chunks while it copies, against one pinned whole before."),
    ratio(PINNING, "cache_vs_none_reused", Some(1.2), "Speed of a 4 MiB copy by a device between buffers used before, with the pin cache, against pinning each time."),
    ratio(PINNING, "never_slower", Some(0.97), "The smallest ratio over all sizes, fresh and reused, of messages with the usual policy against none, and of device copies with the cache against none."),

    ratio(GPU, "host_to_host_vs_memcpy", Some(4.0), "Speed of a copy of 256 MiB between registered memory by the GPU while the caller sleeps, against memcpy."),
    cost(GPU, "host_to_host_cpu_share", "share", Some(0.1), "Processor time of the whole process during that copy, as a share of its time."),
    ratio(GPU, "pageable_to_device_vs_driver", Some(5.0), "Speed of a copy of 256 MiB to the GPU from fresh memory of 4 KiB pages, against the driver's own copy."),
    ratio(GPU, "pageable_to_device_vs_pinned", Some(0.75), "Speed of that copy, against one from memory that the driver pinned long before: the limit."),
    ratio(GPU, "device_to_pageable_vs_driver", None, "Speed of a copy of 256 MiB from the GPU to fresh memory of 4 KiB pages, against the driver's own copy."),
    share(GPU, "overlap_64m", Some(0.97), "Share of a copy of 64 MiB between registered memory by the GPU that hides behind the caller's own work."),
    ratio(GPU, "split_vs_gpu_alone", None, "Speed of a copy of 256 MiB between registered memory that GPU, channels and caller share, against the GPU alone."),

    ratio(LOAD, "load_warm_vs_safetensors", Some(8.0), "Speed of loading a safetensors file of a few large tensors from the page cache to the GPU, against safetensors."),
    ratio(LOAD, "load_shm_vs_safetensors", Some(6.0), "The same for a file in /dev/shm."),
    ratio(LOAD, "load_cold_vs_safetensors", None, "The same for a file that is not in the page cache."),
    ratio(LOAD, "load_warm_vs_pinned_copy", Some(0.85), "Speed of loading from the page cache, against one copy of the same bytes from pinned memory: the limit."),
    ratio(LOAD, "many_small_vs_safetensors", Some(4.0), "Speed of loading 300 tensors, most of them small, from the page cache to the GPU, against safetensors."),
    ratio(LOAD, "to_host_vs_torch", Some(3.0), "Speed of a copy of up to 1 GiB from the GPU to pageable memory, against PyTorch."),
    ratio(LOAD, "to_device_1m_vs_torch", Some(1.0), "Speed of a copy of 1 MiB from pageable memory to the GPU, against PyTorch."),
    cost(LOAD, "python_overhead_us", "µs", None, "Time of a copy of 8 bytes from Python."),
    ratio(LOAD, "queue_64m_vs_multiprocessing", Some(5.0), "Speed of handing 64 MiB over from a worker process, against multiprocessing.Queue."),

    share(DEVICES, "nic_conformance_passed", Some(1.0), "1 if the network card engine passed every case of the conformance suite over an emulated card in a virtual machine, the card did the work and the kernel did not complain, else 0.").counted(),
    share(DEVICES, "nic_bytes_by_device_share", Some(0.99), "Share of a page-aligned copy of 1 MiB that the emulated card moved, and not the processor.").counted(),
    share(DEVICES, "ioat_conformance_passed", Some(1.0), "1 if the engine of Intel's copy engine passed every case over the model of its registers, with faults too, else 0.").counted(),
    cost(DEVICES, "ioat_descriptors_aligned_4m", "descriptors", Some(1024.0), "Descriptors that the model carried out for a page-aligned copy of 4 MiB: one for each page.").counted(),
    cost(DEVICES, "ioat_descriptors_misaligned_4m", "descriptors", Some(2052.0), "The same with source and target 2 KiB apart in their pages: two for each page.").counted(),
    share(DEVICES, "dsa_conformance_passed", Some(1.0), "1 if the engine of Intel's DSA passed every case over the model of its registers and over a queue of the kernel, else 0.").counted(),
    cost(DEVICES, "dsa_descriptors_aligned_4m", "descriptors", Some(4.0), "Descriptors that the model of DSA carried out for a page-aligned copy of 4 MiB.").counted(),
    cost(DEVICES, "dsa_batch_of_64_doorbells", "doorbells", Some(1.0), "Writes to the portal of DSA for 64 descriptors that were submitted together.").counted(),
    share(DEVICES, "dsa_fault_resumed", Some(1.0), "1 if DSA finished a batch over memory that was never touched, after page faults that the driver resolved, else 0.").counted(),
    cost(DEVICES, "device_roundtrip_ns", "ns", Some(1500.0), "Time of a copy of 4 KiB by a device and of the wait for it, less the set time of the model, with the report of the end by the model's thread, which has another core than the caller."),
    cost(DEVICES, "device_submit_ns", "ns", Some(200.0), "Time of the submit of one descriptor to a device, a model, with its doorbell, after others."),
    cost(DEVICES, "device_batch_submit_ns", "ns", Some(40.0), "Time for each of 64 descriptors that are submitted together."),
    cost(DEVICES, "device_syscalls_per_copy", "calls", Some(0.0), "Share of copies by a channel of a device, of memory that is pinned already, that made a system call on the thread that submits and waits.").counted(),
    ratio(DEVICES, "dsa_64k_vs_memcpy", None, "Speed of single copies of 64 KiB by one queue of a real DSA, submitted and waited for, against `memcpy`."),
    ratio(DEVICES, "dsa_4m_vs_memcpy", None, "The same with copies of 4 MiB."),
    ratio(DEVICES, "dsa_batch_4k_vs_memcpy", None, "Speed of batches of 64 copies of 4 KiB by one queue of a real DSA, submitted together and waited for, against `memcpy`."),
    ratio(DEVICES, "ioat_64k_vs_memcpy", None, "Speed of single copies of 64 KiB by one queue of a real I/OAT, submitted and waited for, against `memcpy`."),
    ratio(DEVICES, "ioat_4m_vs_memcpy", None, "The same with copies of 4 MiB."),
    ratio(DEVICES, "ioat_batch_4k_vs_memcpy", None, "Speed of batches of 64 copies of 4 KiB by one queue of a real I/OAT, submitted together and waited for, against `memcpy`."),

    ratio(APPS, "is_vs_best", None, "Speed of an integer sort over several processes, against the faster MPI."),
    ratio(APPS, "ft_vs_best", None, "Speed of a Fourier transform over several processes, against the faster MPI."),

    cost(UNMODIFIED, "tiny_overhead", "ratio", Some(1.01), "Time of a copy of 1 to 96 bytes with the preloaded library of `memferry run --copies`, as a multiple of that without."),
    cost(UNMODIFIED, "profile_overhead", "ratio", Some(1.03), "Time of a program by `memferry run --profile` as a multiple of that without: the median of SQLite, zstd and Python."),
    ratio(UNMODIFIED, "numpy_64m_speedup", Some(1.8), "Speed of a copy of 64 MiB of NumPy by `memferry run --copies`, against that without."),
    ratio(UNMODIFIED, "mpi_4m_shared_heap_vs_own", Some(2.6), "Speed of a message of 4 MiB of Open MPI by `memferry mpirun --shared-heap`, against Open MPI's own transport."),
    ratio(UNMODIFIED, "mpi_64m_shared_heap_vs_own", Some(3.0), "Speed of a message of 64 MiB of Open MPI by `memferry mpirun --shared-heap`, against Open MPI's own transport."),
    ratio(UNMODIFIED, "mpi_np4_64k_shared_heap_vs_own", Some(1.4), "Speed of an exchange of 64 KiB from each to each of 4 processes by Open MPI by `memferry mpirun --shared-heap`, against Open MPI's own transport."),
    cost(UNMODIFIED, "stats_overhead", "ratio", Some(1.01), "Time of a small copy, or of a small message, with counters as a multiple of that without: the larger of both."),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_reached_from_its_better_side() {
        assert_eq!(judge(LATENCY, "hot_4m_vs_memcpy", 2.0, None).status, TargetStatus::Reached);
        assert_eq!(judge(LATENCY, "hot_4m_vs_memcpy", 1.9, None).status, TargetStatus::Missed);
        assert_eq!(judge(OVERHEAD, "submit_ns", 90.0, None).status, TargetStatus::Reached);
        assert_eq!(judge(OVERHEAD, "submit_ns", 101.0, None).status, TargetStatus::Missed);
        assert_eq!(judge(OVERHEAD, "submit_ns", f64::NAN, None).status, TargetStatus::Missed);
    }

    #[test]
    fn times_of_a_busy_machine_are_not_judged_and_counts_are() {
        let why = Some(Disturbance::Busy(0.4));
        let not_judged = TargetStatus::NotJudged(Disturbance::Busy(0.4));
        assert_eq!(judge(LATENCY, "hot_4m_vs_memcpy", 1.9, why).status, not_judged);
        assert_eq!(judge(LATENCY, "hot_4m_vs_memcpy", 2.1, why).status, not_judged);
        assert_eq!(judge(LATENCY, "hot_4k_vs_memcpy", 1.0, why).status, TargetStatus::NoTarget);
        assert_eq!(judge(DEVICES, "nic_conformance_passed", 0.0, why).status, TargetStatus::Missed);
        assert_eq!(
            judge(DEVICES, "ioat_descriptors_aligned_4m", 1024.0, why).status,
            TargetStatus::Reached
        );
    }

    #[test]
    fn a_machine_of_many_cores_has_targets_of_its_own() {
        let judge = |cores, bench, key, value| {
            let judged = judge_on(cores, bench, key, value, None);
            (judged.target, judged.status)
        };
        let (reached, missed) = (TargetStatus::Reached, TargetStatus::Missed);
        for cores in [2, MANY_CORES - 1] {
            assert_eq!(judge(cores, OVERHEAD, "submit_64k_ns", 250.0), ("≤ 200 ns".into(), missed));
            assert_eq!(judge(cores, OVERLAP, "hot_64k", 0.91), ("≥ 0.92".into(), missed));
        }
        for cores in [MANY_CORES, 16] {
            assert_eq!(
                judge(cores, OVERHEAD, "submit_64k_ns", 250.0),
                ("≤ 300 ns".into(), reached)
            );
            assert_eq!(judge(cores, OVERLAP, "hot_64k", 0.91), ("≥ 0.9".into(), reached));
            let rayon = judge(cores, BANDWIDTH, "cold_64k_vs_rayon", 1.02);
            assert_eq!(rayon, ("≥ 1×".into(), reached));
            // One target for all machines.
            let small = judge(cores, LATENCY, "worst_small_vs_memcpy", 0.94);
            assert_eq!(small, ("≥ 0.95×".into(), missed));
        }
    }

    #[test]
    fn a_bar_is_written_with_its_direction_and_unit() {
        assert_eq!(judge(LATENCY, "hot_64m_vs_memcpy", 3.0, None).target, "≥ 2.5×");
        assert_eq!(judge(OVERHEAD, "submit_ns", 3.0, None).target, "≤ 100 ns");
        assert_eq!(judge("overlap", "hot_4m", 0.98, None).target, "≥ 0.97");
    }

    #[test]
    fn an_unknown_key_is_shown_without_judgement() {
        let judged = judge("copy-latency", "something_ns", 12.0, None);
        assert_eq!(judged.value, "12 ns");
        assert_eq!(judged.status, TargetStatus::NoTarget);
    }

    #[test]
    fn the_same_key_may_mean_another_thing_in_another_bench() {
        assert_eq!(judge(LATENCY, "cold_4m_vs_memcpy", 1.0, None).status, TargetStatus::NoTarget);
        assert_eq!(judge(BANDWIDTH, "cold_4m_vs_memcpy", 1.0, None).status, TargetStatus::Missed);
    }

    #[test]
    fn every_key_is_listed_once_per_bench_and_has_a_sentence() {
        for (index, known) in KEYS.iter().enumerate() {
            let twin = |other: &SummaryKey| other.bench == known.bench && other.key == known.key;
            assert_eq!(KEYS.iter().position(twin), Some(index), "{}", known.key);
            assert!(known.meaning.ends_with('.'), "{}", known.key);
        }
    }
}
