//! An engine that wraps another and injects faults by script: delays, descriptors that stop
//! half-way, engine faults at an offset, bad memory, a full ring. The script makes the expected
//! result of a test known.

mod channel;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::contract::{
    Capabilities, Channel, ChannelOptions, CopyDirection, CostLine, Engine, OpenError, Pinner,
};

/// The default capacity of a channel, in descriptors: the inner channel may drain before this one
/// is polled, and does not bound it.
const DEFAULT_CAPACITY: usize = 512;

/// The fault of one descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No fault: the descriptor is executed.
    None,
    /// The descriptor is executed, and its end is reported this much later.
    Delay(Duration),
    /// The engine stops after `done_bytes` and reports it; the rest is not accessed.
    Partial {
        /// The finished bytes (at most the whole length).
        done_bytes: u64,
    },
    /// The engine reports a fault of its own after `done_bytes`.
    EngineFault {
        /// The finished bytes (at most the whole length).
        done_bytes: u64,
    },
    /// The memory is reported as bad after `done_bytes`.
    BadMemory {
        /// The finished bytes (at most the whole length).
        done_bytes: u64,
    },
}

/// The faults of a channel's submits and descriptors, in order. After the end of the script there
/// are no more.
#[derive(Debug, Clone, Default)]
pub struct FaultScript {
    /// The fault of each accepted descriptor.
    pub descriptors: VecDeque<Fault>,
    /// For each submit: whether the ring reports that it is full.
    pub full: VecDeque<bool>,
    /// Restarts the script at its end.
    pub repeat: bool,
}

impl FaultScript {
    /// A script of these faults, once.
    pub fn of(faults: impl IntoIterator<Item = Fault>) -> Self {
        Self { descriptors: faults.into_iter().collect(), ..Self::default() }
    }

    /// Sets for each submit whether the ring reports that it is full.
    pub fn full(mut self, submits: impl IntoIterator<Item = bool>) -> Self {
        self.full = submits.into_iter().collect();
        self
    }

    /// Restarts the script at its end.
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
    script: Arc<Mutex<FaultScript>>,
}

impl FaultEngine {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Engine>, script: FaultScript) -> Self {
        let capabilities = Capabilities {
            // The channel inspects every descriptor, so it needs them one by one; and it reports
            // for the inner engine, so a thread must poll it.
            claims_chunks: false,
            infallible: false,
            auto_progress: false,
            writes_notifications: false,
            ..inner.capabilities().clone()
        };
        let name = format!("fault({})", inner.name());
        Self { inner, name, capabilities, script: Arc::new(Mutex::new(script)) }
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

    fn devices(&self) -> Vec<String> {
        self.inner.devices()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn cost(&self, direction: CopyDirection) -> CostLine {
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
