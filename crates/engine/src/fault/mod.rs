//! An engine that wraps another and makes it misbehave: delays, descriptors that end half-way,
//! faults at an offset, bad memory, a ring that is full. What it injects is decided by a script,
//! so that a test knows what must come out.

mod channel;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use memferry_sys::sync::lock;

use crate::contract::{
    Capabilities, Channel, ChannelOptions, CostLine, Direction, Engine, OpenError, Pinner,
};

/// Descriptors a channel holds unless told otherwise: the inner one may drain sooner than this one
/// is polled, and does not bound it.
const DEFAULT_CAPACITY: usize = 512;

/// What happens to one descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: it is carried out.
    None,
    /// It is carried out, and its end is reported this much later.
    Delay(Duration),
    /// The engine stops after so many bytes and says so; the rest is untouched.
    Partial {
        /// Bytes done (at most the whole length).
        done_bytes: u64,
    },
    /// The engine reports a fault of its own after so many bytes.
    EngineFault {
        /// Bytes done (at most the whole length).
        done_bytes: u64,
    },
    /// The memory is reported as bad after so many bytes.
    BadMemory {
        /// Bytes done (at most the whole length).
        done_bytes: u64,
    },
}

/// What happens to a channel's submits and descriptors, in order. When it runs out, nothing more
/// happens.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// For each descriptor taken.
    pub descriptors: VecDeque<Fault>,
    /// For each submit: whether the ring pretends to be full.
    pub full: VecDeque<bool>,
    /// Start again when the end is reached.
    pub repeat: bool,
}

impl Script {
    /// These faults, once.
    pub fn of(faults: impl IntoIterator<Item = Fault>) -> Self {
        Self { descriptors: faults.into_iter().collect(), ..Self::default() }
    }

    /// Every submit of these finds the ring full where it says so.
    pub fn full(mut self, submits: impl IntoIterator<Item = bool>) -> Self {
        self.full = submits.into_iter().collect();
        self
    }

    /// Start again when the end is reached.
    pub fn repeating(mut self) -> Self {
        self.repeat = true;
        self
    }

    fn next_fault(&mut self) -> Fault {
        next(&mut self.descriptors, self.repeat).unwrap_or(Fault::None)
    }

    fn next_full(&mut self) -> bool {
        next(&mut self.full, self.repeat).unwrap_or(false)
    }
}

fn next<T: Copy>(queue: &mut VecDeque<T>, repeat: bool) -> Option<T> {
    let value = queue.pop_front()?;
    if repeat {
        queue.push_back(value);
    }
    Some(value)
}

/// The wrapping engine. All its channels share one script.
pub struct FaultEngine {
    inner: Arc<dyn Engine>,
    name: String,
    capabilities: Capabilities,
    script: Arc<Mutex<Script>>,
}

impl FaultEngine {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Engine>, script: Script) -> Self {
        let capabilities = Capabilities {
            // It looks at every descriptor, so it must be given them one by one; and it reports
            // for the inner engine, for which somebody has to poll.
            claims_chunks: false,
            never_fails: false,
            self_driving: false,
            notifies: false,
            ..inner.capabilities().clone()
        };
        let name = format!("fault({})", inner.name());
        Self { inner, name, capabilities, script: Arc::new(Mutex::new(script)) }
    }

    /// Replaces the script for all channels.
    pub fn set_script(&self, script: Script) {
        *lock(&self.script) = script;
    }
}

impl fmt::Debug for FaultEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultEngine").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Engine for FaultEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, direction: Direction) -> CostLine {
        self.inner.cost(direction)
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        self.inner.pinner()
    }

    fn open_channel(&self, options: &ChannelOptions) -> Result<Arc<dyn Channel>, OpenError> {
        let inner = self.inner.open_channel(options)?;
        let capacity = options.capacity.unwrap_or(DEFAULT_CAPACITY).max(1);
        Ok(Arc::new(channel::FaultChannel::new(inner, self.script.clone(), capacity)))
    }
}
