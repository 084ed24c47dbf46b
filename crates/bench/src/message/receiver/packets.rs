//! Messages that arrived in packets, in a ring of buffers as in a kernel, and are delivered to the
//! user's memory: by memcpy, or by a ferry while the previous task is computed. One thread of this
//! process does everything except the work of the ferry. After the delivery from kernel to user in
//! the paper.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::ensure;
use memferry::engine::nic::{NicConfig, NicEngine};
use memferry::engine::pci::available_devices;
use memferry::sys::pages::Pages;
use memferry::sys::{affinity, clock};
use memferry::{EngineSelection, Ferry, Notification, Options, Segment, Transfer};
use memferry_sys::vfio::pci::E1000E;

use super::CHECKED_MESSAGES;
use super::slots::{HOT_SLOTS, MessageSlots};
use super::work::OverheadTimer;
use crate::group::TaskRunner;
use crate::group::command::{GroupTask, WorkerCommand};
use crate::group::cores::MemberCores;
use crate::harness::Sample;
use crate::harness::{ColdCursor, memcpy};
use crate::message::messages::fill_with_pattern;

/// Size of a buffer of the ring, and offset of a packet's payload in it: after the headers of
/// Ethernet, IP and TCP, which a kernel aligns.
const BUFFER_BYTES: usize = 2048;
const PAYLOAD_AT: usize = 66;
const PAYLOAD_BYTES: usize = 1460;
/// Bytes of the ring for cold packets. Tests check only the delivered data, so they use a small
/// ring.
const COLD_RING_BYTES: usize = if cfg!(test) { 8 << 20 } else { 256 << 20 };
/// Channel capacity for the packets of two messages of 1 MiB.
const CAPACITY: usize = 2048;

/// How packets become a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PacketPath {
    /// The receiver copies the packets, then computes.
    Memcpy,
    /// The receiver starts the delivery of the next message, waits for this one, then computes.
    Deliver,
}

/// A receiver of packets.
pub(crate) struct PacketReceiver {
    path: PacketPath,
    core: usize,
    fixture: Arc<Mutex<PacketFixture>>,
}

/// State that both paths share, since they run alternately.
struct PacketFixture {
    // Dropped before the memory: closing the ferry ends everything that is in flight.
    ferry: Ferry,
    memory: Option<PacketMemory>,
    /// One notification variable for each slot that may be in flight, and the number of messages so
    /// far.
    arrived: [Notification; HOT_SLOTS],
    messages: u64,
}

struct PacketMemory {
    ring: Pages,
    cursor: ColdCursor,
    slots: MessageSlots,
    bytes: usize,
}

impl PacketReceiver {
    /// Returns one receiver for each of the two paths.
    pub(crate) fn pair(cores: &MemberCores, ways: [PacketPath; 2]) -> [Result<Self, String>; 2] {
        let core = cores.of_member(0);
        let desk = PacketFixture::open(core).map(|desk| Arc::new(Mutex::new(desk)));
        let desk = desk.map_err(|error| error.to_string());
        ways.map(|way| desk.clone().map(|desk| Self { path: way, core, fixture: desk }))
    }
}

impl TaskRunner for PacketReceiver {
    fn run(&mut self, order: WorkerCommand) -> Result<Sample, String> {
        let GroupTask::Receive { bytes, cold } = order.task else {
            return Err("can only receive tasks".into());
        };
        let (way, core, desk) = (self.path, self.core, &self.fixture);
        let receive = move || {
            affinity::bind_to_core(core)?;
            let mut desk = desk.lock().unwrap_or_else(PoisonError::into_inner);
            desk.prepare(usize::try_from(bytes)?, cold)?;
            desk.timed(way, order.iterations)
        };
        std::thread::scope(|scope| scope.spawn(receive).join())
            .map_err(|_| "a thread failed".to_owned())?
            .map_err(|error: anyhow::Error| error.to_string())
    }
}

/// Opens a ferry over the network card that `MEMFERRY_NIC` names, or else the default ferry. The
/// card is the only engine: next to the faster processor cores, the planner would give it no work.
fn open_ferry(receiver_core: usize) -> anyhow::Result<Ferry> {
    let others = affinity::allowed_cores().into_iter().filter(|&core| core != receiver_core);
    let builder = Ferry::builder().capacity(CAPACITY).bind_to(others);
    let named = std::env::var("MEMFERRY_NIC").unwrap_or_default();
    let address = match named.trim() {
        "" | "off" => None,
        "auto" => available_devices(E1000E).into_iter().next(),
        address => Some(address.to_owned()),
    };
    let Some(address) = address else { return Ok(builder.build()?) };
    let card = NicEngine::open(&address, NicConfig::default())?;
    Ok(builder.engine(Arc::new(card), 1).nic(EngineSelection::Off).build()?)
}

impl PacketFixture {
    /// Opens a ferry whose threads do not run on the receiver's core, if there are other cores.
    fn open(core: usize) -> anyhow::Result<Self> {
        let arrived = std::array::from_fn(|_| Notification::new(0));
        Ok(Self { ferry: open_ferry(core)?, memory: None, arrived, messages: 0 })
    }

    /// Allocates memory for messages of this kind, and verifies deliveries to it. Returns at once
    /// if the last command was for the same kind.
    fn prepare(&mut self, bytes: usize, cold: bool) -> anyhow::Result<()> {
        if self.memory.as_ref().is_some_and(|memory| memory.slots.matches(bytes, cold)) {
            return Ok(());
        }
        self.memory = Some(PacketMemory::reuse_or_new(self.memory.take(), bytes, cold)?);
        for way in [PacketPath::Memcpy, PacketPath::Deliver] {
            let mut right = true;
            self.receive(way, CHECKED_MESSAGES, |message, packets| {
                right &= packets.zip(message.chunks(PAYLOAD_BYTES)).all(|(sent, got)| sent == got);
                // Cleared, so that the next message in this slot must write its own bytes.
                message.fill(0);
            })?;
            ensure!(right, "a byte of a packet got lost");
        }
        Ok(())
    }

    fn timed(&mut self, way: PacketPath, iterations: u64) -> anyhow::Result<Sample> {
        let memory = self.memory.as_ref().expect("prepared before");
        let mut watch = OverheadTimer::new(memory.bytes, iterations);
        self.receive(way, watch.tasks(), |message, _| watch.run_task(message))?;
        let message = self.memory.as_mut().expect("prepared before").slots.first_mut();
        // The clock of the thread, not of the process: a thread of the ferry may be polling for
        // more work.
        let timing = watch.finish(message, clock::thread_cpu_ns);
        Ok(timing.expect("there were as many tasks as it takes"))
    }

    /// Delivers the next messages and runs `task` on each message and its packets.
    fn receive(
        &mut self,
        way: PacketPath,
        times: u64,
        mut task: impl FnMut(&mut [u8], &mut dyn Iterator<Item = &[u8]>),
    ) -> anyhow::Result<()> {
        let memory = self.memory.as_mut().expect("prepared before");
        if way == PacketPath::Memcpy {
            for _ in 0..times {
                let (place, buffers) = memory.next();
                // SAFETY: nothing is in flight.
                let message = unsafe { memory.slots.slot_mut(&place) };
                let packets = || packets(&memory.ring, buffers.clone(), place.len());
                for (packet, chunk) in packets().zip(message.chunks_mut(PAYLOAD_BYTES)) {
                    memcpy(chunk, packet);
                }
                task(message, &mut packets());
            }
            return Ok(());
        }
        let mut under_way: VecDeque<Delivery<'_>> = VecDeque::with_capacity(HOT_SLOTS);
        let mut pieces = Vec::new();
        for received in 0..times {
            while under_way.len() < 2 && received + (under_way.len() as u64) < times {
                self.messages += 1;
                let variable = &self.arrived[(self.messages % HOT_SLOTS as u64) as usize];
                let (place, buffers) = memory.next();
                let packets = packets(&memory.ring, buffers.clone(), place.len());
                pieces.clear();
                pieces.extend(packets.map(Segment::from));
                let options = Options::new().notify(variable, self.messages);
                let target = memory.slots.address(&place);
                // SAFETY: a slot is reused after `HOT_SLOTS` messages at the earliest, and no more
                // are in flight, so this slot is free until the wait below returns; nothing writes
                // to the ring. On an earlier error, the ferry is dropped before the memory.
                let transfer = unsafe { self.ferry.ideliver_raw(&pieces, target, options) }?;
                let value = self.messages;
                under_way.push_back(Delivery { transfer, variable, value, slot: place, buffers });
            }
            let delivery = under_way.pop_front().expect("as many begun as waited for");
            delivery.wait()?;
            let Delivery { slot: place, buffers, .. } = delivery;
            // SAFETY: the delivery to this slot is complete, and the other deliveries are to other
            // slots.
            let message = unsafe { memory.slots.slot_mut(&place) };
            task(message, &mut packets(&memory.ring, buffers, place.len()));
        }
        Ok(())
    }
}

/// A message in flight from the ring to its slot.
struct Delivery<'a> {
    transfer: Transfer,
    variable: &'a Notification,
    value: u64,
    slot: Range<usize>,
    buffers: Range<usize>,
}

impl Delivery<'_> {
    /// Polls the notification variable for a moment, then waits for the transfer: a wait executes what
    /// no channel has started, and reports a failure.
    fn wait(&self) -> anyhow::Result<()> {
        const POLLS: u32 = 64;
        for _ in 0..POLLS {
            if self.variable.load() == self.value {
                return Ok(());
            }
            spin_loop();
        }
        self.transfer.wait()?;
        Ok(())
    }
}

impl PacketMemory {
    /// Returns a ring full of packets, and slots. The memory of `old` is reused if it is large
    /// enough.
    fn reuse_or_new(old: Option<Self>, bytes: usize, cold: bool) -> anyhow::Result<Self> {
        let length = match cold {
            true => COLD_RING_BYTES,
            false => HOT_SLOTS * buffers_bytes(bytes),
        };
        ensure!(buffers_bytes(bytes) <= length, "the ring is too small for {bytes} bytes");
        let (ring, places) = old.map(|old| (old.ring, old.slots)).unzip();
        let ring = match ring.filter(|ring: &Pages| ring.len() >= length) {
            Some(ring) => ring,
            None => {
                let mut ring = Pages::new(length)?;
                fill_with_pattern(ring.as_mut_slice(), 0);
                ring
            }
        };
        let places = MessageSlots::reuse_or_new(places, bytes, cold, true)?;
        Ok(Self { ring, cursor: ColdCursor::over(length), slots: places, bytes })
    }

    /// Returns the next slot, and the buffers of the message for it.
    fn next(&mut self) -> (Range<usize>, Range<usize>) {
        (self.slots.next(), self.cursor.next(buffers_bytes(self.bytes)))
    }
}

/// Bytes of the buffers that the packets of a message occupy.
fn buffers_bytes(bytes: usize) -> usize {
    bytes.div_ceil(PAYLOAD_BYTES) * BUFFER_BYTES
}

/// Packets of a message of `bytes` bytes.
fn packets(ring: &Pages, buffers: Range<usize>, bytes: usize) -> impl Iterator<Item = &[u8]> {
    let mut left = bytes;
    ring.as_slice()[buffers].chunks_exact(BUFFER_BYTES).map(move |buffer| {
        let length = left.min(PAYLOAD_BYTES);
        left -= length;
        &buffer[PAYLOAD_AT..PAYLOAD_AT + length]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_make_up_the_message() {
        let mut ring = Pages::new(4 * BUFFER_BYTES).unwrap();
        fill_with_pattern(ring.as_mut_slice(), 0);
        let lengths = |bytes| {
            let all = packets(&ring, 0..buffers_bytes(bytes), bytes);
            all.map(<[u8]>::len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(1), [1]);
        assert_eq!(lengths(1460), [1460]);
        assert_eq!(lengths(3000), [1460, 1460, 80]);
        let second = packets(&ring, BUFFER_BYTES..3 * BUFFER_BYTES, 2000).nth(1).unwrap();
        assert_eq!(second, &ring.as_slice()[2 * BUFFER_BYTES + PAYLOAD_AT..][..540]);
    }

    #[test]
    fn both_ways_deliver_every_byte() {
        let ways = [PacketPath::Memcpy, PacketPath::Deliver];
        for receiver in PacketReceiver::pair(&MemberCores::of_this_machine(), ways) {
            let mut receiver = receiver.unwrap();
            for (bytes, cold) in [(1, false), (5000, false), (300_000, false), (70_001, true)] {
                for iterations in [1, 12] {
                    let task = GroupTask::Receive { bytes, cold };
                    let timing = receiver.run(WorkerCommand { task, iterations }).unwrap();
                    assert!(timing.total_ns > 0.0, "{:?}", receiver.path);
                }
            }
        }
    }
}
