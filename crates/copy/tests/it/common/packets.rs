//! Messages in packets, as they lie in a ring of buffers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memferry_copy::{Ferry, Notification, Options, Segment, Transfer};
use memferry_engine::contract::{Capabilities, CopyDirection, Pinner};
use memferry_engine::{Channel, ChannelOptions, CostLine, Engine, OpenError};
use memferry_memory::pinning::{Access, PageRange, PinError, PinToken};
use memferry_sys::Pages;

pub(crate) const PACKET: usize = 1460;
const BUFFER: usize = 2048;
const HEADER: usize = 66;

/// A ring of buffers, full of packets.
pub(crate) fn ring(packets: usize) -> Pages {
    let mut ring = Pages::new(packets * BUFFER).unwrap();
    let length = ring.len();
    ring.as_mut_slice().copy_from_slice(&crate::common::pattern(length, packets as u64));
    ring
}

/// Its packets.
pub(crate) fn packets(ring: &Pages) -> Vec<&[u8]> {
    ring.as_slice().chunks(BUFFER).map(|buffer| &buffer[HEADER..HEADER + PACKET]).collect()
}

pub(crate) fn raw(packets: &[&[u8]]) -> Vec<Segment> {
    packets.iter().map(|packet| Segment::from(*packet)).collect()
}

/// Starts a gather copy to memory that lives until the transfer is complete, as in all tests here.
pub(crate) fn start(
    ferry: &Ferry,
    packets: &[&[u8]],
    target: &mut Pages,
    options: Options<'_>,
) -> Transfer {
    assert_eq!(target.len(), packets.iter().map(|packet| packet.len()).sum());
    let to = target.as_mut_slice().as_mut_ptr();
    // SAFETY: the tests keep both until they have waited, or the ferry is dropped.
    unsafe { ferry.ideliver_raw(&raw(packets), to, options) }.unwrap()
}

/// Copies repeatedly, and checks every byte as soon as the variable is set.
pub(crate) fn is_complete_when_it_is_notified(ferry: &Ferry, packets: &[&[u8]], rounds: u64) {
    let expected = packets.concat();
    let mut target = Pages::new(expected.len()).unwrap();
    let variable = Notification::new(0);
    for round in 1..=rounds {
        target.as_mut_slice().fill(0);
        let options = Options::new().notify(&variable, round).no_caller_assist();
        let transfer = start(ferry, packets, &mut target, options);
        while variable.load() != round {
            std::thread::yield_now();
        }
        assert!(target.as_slice() == expected, "told before the last byte, in round {round}");
        transfer.wait().unwrap();
    }
}

/// An engine that cannot pin some of the memory.
#[derive(Debug)]
pub(crate) struct RefusingEngine<E> {
    engine: Arc<E>,
    pinner: Arc<RefusingPinner>,
}

impl<E: Engine> RefusingEngine<E> {
    /// Refuses one pin in this many.
    pub(crate) fn new(engine: Arc<E>, every: u64) -> Self {
        let pinner = engine.pinner().expect("an engine with pinned memory");
        Self {
            engine,
            pinner: Arc::new(RefusingPinner { pinner, every, asked: AtomicU64::new(0) }),
        }
    }
}

impl<E: Engine> Engine for RefusingEngine<E> {
    fn name(&self) -> &str {
        self.engine.name()
    }

    fn capabilities(&self) -> &Capabilities {
        self.engine.capabilities()
    }

    fn cost(&self, direction: CopyDirection) -> CostLine {
        self.engine.cost(direction)
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        Some(self.pinner.clone())
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        self.engine.open_channel(options)
    }
}

#[derive(Debug)]
struct RefusingPinner {
    pinner: Arc<dyn Pinner>,
    every: u64,
    asked: AtomicU64,
}

impl Pinner for RefusingPinner {
    fn name(&self) -> &'static str {
        "refusing"
    }

    fn pin(&self, range: PageRange, access: Access) -> Result<PinToken, PinError> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        if asked.is_multiple_of(self.every) {
            return Err(PinError::Refused { what: "pinning on a bad day", code: libc::EBUSY });
        }
        self.pinner.pin(range, access)
    }

    fn unpin(&self, range: PageRange, token: &PinToken) {
        self.pinner.unpin(range, token);
    }

    fn tracks_mapping(&self) -> bool {
        self.pinner.tracks_mapping()
    }
}
