//! Messages that have arrived in packets, in a ring of buffers such as a kernel has, and are delivered
//! to where the user wants them: by memcpy, or by a ferry while the task before is computed. One thread
//! of this process does it all but what the ferry does. After the paper's delivery from kernel to user.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{bail, ensure};
use memferry::engine::device::ready;
use memferry::engine::nic::{NicEngine, Settings};
use memferry::sys::pages::Pages;
use memferry::sys::{affinity, clock};
use memferry::{Ferry, Notification, Options, PciDevices, Piece, Transfer};
use memferry_sys::vfio::pci::E1000E;

use super::places::{HOT_PLACES, Places};
use super::work::Watch;
use super::{CHECKED, keep_off};
use crate::bench::group::Contender;
use crate::bench::group::cores::Cores;
use crate::bench::group::messages::fill_with_pattern;
use crate::bench::group::order::{Order, Task, Timing};
use crate::bench::measure::{Walk, memcpy};

/// A buffer of the ring, and where in it the payload of a packet lies: behind the headers of Ethernet,
/// IP and TCP, which a kernel puts at such an offset that they are aligned.
const BUFFER_BYTES: usize = 2048;
const PAYLOAD_AT: usize = 66;
const PAYLOAD_BYTES: usize = 1460;
/// The ring when packets are cold. Tests are about what is delivered from it.
const COLD_RING_BYTES: usize = if cfg!(test) { 8 << 20 } else { 256 << 20 };
/// Room for the packets of two messages of a mebibyte.
const CAPACITY: usize = 2048;

/// How packets become a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::bench::group) enum Way {
    /// The receiver copies them, then computes.
    Memcpy,
    /// The receiver has those of the next message delivered, waits for this one, then computes.
    Deliver,
}

/// A receiver of packets.
pub(in crate::bench::group) struct PacketReceiver {
    way: Way,
    core: usize,
    desk: Arc<Mutex<Desk>>,
}

/// What all ways share, since they take turns.
struct Desk {
    // Before the memory: its end is the end of everything that is in flight.
    ferry: Ferry,
    memory: Option<Memory>,
    /// One for each place that may be in flight, and how many messages there were.
    arrived: [Notification; HOT_PLACES],
    messages: u64,
}

struct Memory {
    ring: Pages,
    walk: Walk,
    places: Places,
    bytes: usize,
}

impl PacketReceiver {
    /// One for each of these ways.
    pub(in crate::bench::group) fn pair(
        cores: &Cores,
        ways: [Way; 2],
    ) -> [Result<Self, String>; 2] {
        let core = cores.of_member(0);
        let desk = Desk::open(core).map(|desk| Arc::new(Mutex::new(desk)));
        let desk = desk.map_err(|error| error.to_string());
        ways.map(|way| desk.clone().map(|desk| Self { way, core, desk }))
    }
}

impl Contender for PacketReceiver {
    fn carry_out(&mut self, order: Order) -> Result<Timing, String> {
        let Task::Receive { bytes, cold } = order.task else {
            return Err("can only receive tasks".into());
        };
        let (way, core, desk) = (self.way, self.core, &self.desk);
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

/// A ferry over the network card that `MEMFERRY_NIC` names, if it does: beside processors, which are
/// quicker, it would be given nothing. Elsewhere the usual one.
fn open_ferry() -> anyhow::Result<Ferry> {
    let builder = Ferry::builder().capacity(CAPACITY);
    let named = std::env::var("MEMFERRY_NIC").unwrap_or_default();
    let address = match named.trim() {
        "" | "off" => None,
        "auto" => ready(E1000E).into_iter().next(),
        address => Some(address.to_owned()),
    };
    let Some(address) = address else { return Ok(builder.build()?) };
    let card = NicEngine::open(&address, Settings::default())?;
    Ok(builder.engine(Arc::new(card), 1).nic(PciDevices::Off).build()?)
}

impl Desk {
    /// Opens a ferry whose threads keep off the receiver's core, if there are others.
    fn open(core: usize) -> anyhow::Result<Self> {
        let open = move || -> anyhow::Result<Ferry> {
            keep_off(core)?;
            open_ferry()
        };
        let Ok(ferry) = std::thread::spawn(open).join() else { bail!("a thread failed") };
        let arrived = std::array::from_fn(|_| Notification::new(0));
        Ok(Self { ferry: ferry?, memory: None, arrived, messages: 0 })
    }

    /// Memory for messages of this kind, and a look at what is delivered to it. Returns at once if
    /// the last order was for the same kind.
    fn prepare(&mut self, bytes: usize, cold: bool) -> anyhow::Result<()> {
        if self.memory.as_ref().is_some_and(|memory| memory.places.are_for(bytes, cold)) {
            return Ok(());
        }
        self.memory = Some(Memory::make(self.memory.take(), bytes, cold)?);
        for way in [Way::Memcpy, Way::Deliver] {
            let mut right = true;
            self.receive(way, CHECKED, |message, packets| {
                right &= packets.zip(message.chunks(PAYLOAD_BYTES)).all(|(sent, got)| sent == got);
                // The next one here must bring its own.
                message.fill(0);
            })?;
            ensure!(right, "a byte of a packet got lost");
        }
        Ok(())
    }

    fn timed(&mut self, way: Way, iterations: u64) -> anyhow::Result<Timing> {
        let memory = self.memory.as_ref().expect("prepared before");
        let mut watch = Watch::new(memory.bytes, iterations);
        self.receive(way, watch.tasks(), |message, _| watch.task(message))?;
        let message = self.memory.as_mut().expect("prepared before").places.first();
        // Not the time of the process: a thread of the ferry may be waiting for more.
        let timing = watch.timing(message, clock::thread_cpu_ns);
        Ok(timing.expect("there were as many tasks as it takes"))
    }

    /// Delivers the next messages, and does the task of each, which may look at its packets.
    fn receive(
        &mut self,
        way: Way,
        times: u64,
        mut task: impl FnMut(&mut [u8], &mut dyn Iterator<Item = &[u8]>),
    ) -> anyhow::Result<()> {
        let memory = self.memory.as_mut().expect("prepared before");
        if way == Way::Memcpy {
            for _ in 0..times {
                let (place, buffers) = memory.next();
                // SAFETY: nothing is in flight.
                let message = unsafe { memory.places.at(&place) };
                let packets = || packets(&memory.ring, buffers.clone(), place.len());
                for (packet, chunk) in packets().zip(message.chunks_mut(PAYLOAD_BYTES)) {
                    memcpy(chunk, packet);
                }
                task(message, &mut packets());
            }
            return Ok(());
        }
        let mut under_way: VecDeque<Delivery<'_>> = VecDeque::with_capacity(HOT_PLACES);
        for received in 0..times {
            while under_way.len() < 2 && received + (under_way.len() as u64) < times {
                self.messages += 1;
                let variable = &self.arrived[(self.messages % HOT_PLACES as u64) as usize];
                let (place, buffers) = memory.next();
                let pieces: Vec<_> =
                    packets(&memory.ring, buffers.clone(), place.len()).map(Piece::from).collect();
                let options = Options::new().notify(variable, self.messages);
                let target = memory.places.address(&place);
                // SAFETY: a place comes again after `HOT_PLACES` at the earliest, and no more are under
                // way, so this one is free until the wait below has ended; nobody writes to the ring.
                // If something goes wrong before, the ferry ends before the memory goes.
                let transfer = unsafe { self.ferry.ideliver(&pieces, target, options) }?;
                let value = self.messages;
                under_way.push_back(Delivery { transfer, variable, value, place, buffers });
            }
            let delivery = under_way.pop_front().expect("as many begun as waited for");
            delivery.wait()?;
            let Delivery { place, buffers, .. } = delivery;
            // SAFETY: the delivery to this place is over, and the others are to other places.
            let message = unsafe { memory.places.at(&place) };
            task(message, &mut packets(&memory.ring, buffers, place.len()));
        }
        Ok(())
    }
}

/// A message on its way from the ring to its place.
struct Delivery<'a> {
    transfer: Transfer,
    variable: &'a Notification,
    value: u64,
    place: Range<usize>,
    buffers: Range<usize>,
}

impl Delivery<'_> {
    /// Looks at the variable until it is set. A delivery that fails sets nothing.
    fn wait(&self) -> anyhow::Result<()> {
        const LOOKS_PER_CHECK: u32 = 256;
        for look in 1u32.. {
            if self.variable.load() == self.value {
                break;
            }
            if look.is_multiple_of(LOOKS_PER_CHECK) && self.transfer.is_done() {
                self.transfer.wait()?;
            }
            spin_loop();
        }
        Ok(())
    }
}

impl Memory {
    /// A ring full of packets, and places, in the memory of others if there is enough of it.
    fn make(old: Option<Self>, bytes: usize, cold: bool) -> anyhow::Result<Self> {
        let length = match cold {
            true => COLD_RING_BYTES,
            false => HOT_PLACES * buffers_bytes(bytes),
        };
        ensure!(buffers_bytes(bytes) <= length, "the ring is too small for {bytes} bytes");
        let (ring, places) = old.map(|old| (old.ring, old.places)).unzip();
        let ring = match ring.filter(|ring: &Pages| ring.len() >= length) {
            Some(ring) => ring,
            None => {
                let mut ring = Pages::new(length)?;
                fill_with_pattern(ring.as_mut_slice(), 0);
                ring
            }
        };
        let places = Places::make(places, bytes, cold, true)?;
        Ok(Self { ring, walk: Walk::over(length), places, bytes })
    }

    /// The next place, and the buffers of the message that goes there.
    fn next(&mut self) -> (Range<usize>, Range<usize>) {
        (self.places.next(), self.walk.next(buffers_bytes(self.bytes)))
    }
}

/// What the buffers take up that the packets of a message fill.
fn buffers_bytes(bytes: usize) -> usize {
    bytes.div_ceil(PAYLOAD_BYTES) * BUFFER_BYTES
}

/// The packets of a message of so many bytes.
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
        let ways = [Way::Memcpy, Way::Deliver];
        for receiver in PacketReceiver::pair(&Cores::of_this_machine(), ways) {
            let mut receiver = receiver.unwrap();
            for (bytes, cold) in [(1, false), (5000, false), (300_000, false), (70_001, true)] {
                for iterations in [1, 12] {
                    let task = Task::Receive { bytes, cold };
                    let timing = receiver.carry_out(Order { task, iterations }).unwrap();
                    assert!(timing.total_ns > 0.0, "{:?}", receiver.way);
                }
            }
        }
    }
}
