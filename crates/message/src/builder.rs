//! Settings of endpoints and links: from the caller, then from the environment, then from measurement.

use std::time::Duration;

use memferry_sys::copy::stream::Streaming;
use memferry_sys::settings::{self, size, switch};

use crate::error::{Error, ValidationError};
use crate::plan::{MessagePlanContext, MessageProfile, PathKind, Pinning};
use crate::port::{self, PortConfig};
use crate::region::heap;

/// Settings of a new endpoint, listener or link. A setting that is not set here is read from the environment;
/// one that is not set there is measured or has a default.
///
/// ```
/// use memferry::message::Endpoint;
///
/// let endpoint = Endpoint::builder().background(true).open("doc-builder")?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "nothing happens before it is opened"]
pub struct EndpointBuilder {
    config: PortConfig,
    /// The prefault mode, if it is set.
    pinning: Option<Pinning>,
    error: Option<ValidationError>,
}

impl EndpointBuilder {
    /// The environment variables that are read.
    pub const VARIABLES: [&'static str; 11] = [
        "MEMFERRY_BACKGROUND",
        "MEMFERRY_CMA",
        "MEMFERRY_EAGER_BYTES",
        "MEMFERRY_COOPERATIVE_BYTES",
        "MEMFERRY_OFFLOAD_BYTES",
        "MEMFERRY_PATH",
        "MEMFERRY_PINNING",
        "MEMFERRY_MESSAGE_SPIN_NS",
        port::STREAMING_VARIABLE,
        heap::PEERS_VARIABLE,
        crate::window::rma_engine::TRACE_VARIABLE,
    ];

    /// Creates a builder without settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes progress on a progress thread, so that messages arrive while the application computes and makes
    /// no calls (`MEMFERRY_BACKGROUND=on`).
    pub fn background(mut self, background: bool) -> Self {
        self.config.background = background;
        self
    }

    /// Allows connections with processes of a further user. Default: the user of this process alone.
    pub fn allow_uid(mut self, uid: u32) -> Self {
        self.config.allowed.uids.push(uid);
        self
    }

    /// As [`EndpointBuilder::allow_uid`], by the user's name.
    pub fn allow_user(mut self, name: &str) -> Self {
        match memferry_sys::user::uid_of(name) {
            Some(uid) => self.allow_uid(uid),
            None => {
                self.error = Some(ValidationError::Setting {
                    name: "allow_user",
                    value: name.to_owned(),
                    expected: "the name of a user of this machine",
                });
                self
            }
        }
    }

    /// Sets whether the memory of peers is read and written directly where the system permits it
    /// (`MEMFERRY_CMA=off` forbids it). Default: yes.
    pub fn cross_memory(mut self, use_it: bool) -> Self {
        self.config.cross_memory = use_it;
        self
    }

    /// Sets the maximum size in bytes of eager messages, at most 128 KiB (`MEMFERRY_EAGER_BYTES`).
    pub fn eager_bytes(mut self, bytes: u64) -> Self {
        self.config.limits.eager_bytes = Some(bytes);
        self
    }

    /// Sets the size in bytes from which both sides copy a message (`MEMFERRY_COOPERATIVE_BYTES`).
    pub fn cooperative_bytes(mut self, bytes: u64) -> Self {
        self.config.limits.cooperative_bytes = Some(bytes);
        self
    }

    /// Sets the size in bytes from which engines copy messages in shareable memory
    /// (`MEMFERRY_OFFLOAD_BYTES`).
    pub fn offload_bytes(mut self, bytes: u64) -> Self {
        self.config.limits.offload_bytes = Some(bytes);
        self
    }

    /// Sets the path of messages that are not eager, where it is possible (`MEMFERRY_PATH`: `single`,
    /// `cooperative`, `offload` or `pipeline`).
    pub fn path(mut self, path: PathKind) -> Self {
        self.config.limits.path = Some(path);
        self
    }

    /// Sets whether memory that is not resident (never touched, discarded, swapped out) is prefaulted just
    /// before it is copied (`MEMFERRY_PINNING`: `auto`, `off` or `on`). Default: `auto`, which checks whether
    /// it is resident.
    pub fn pinning(mut self, pinning: Pinning) -> Self {
        self.pinning = Some(pinning);
        self
    }

    /// Sets how long a waiting thread polls before it sleeps, in ns (`MEMFERRY_MESSAGE_SPIN_NS`). Default:
    /// 50 µs, or 100 µs if processes share cores, because other processes run between two polls.
    pub fn spin_ns(mut self, spin_ns: u64) -> Self {
        self.config.spin_ns = Some(spin_ns);
        self
    }

    /// Sets the maximum number of peers. Default: 1024.
    pub fn max_peers(mut self, peers: usize) -> Self {
        self.config.max_peers = peers;
        self
    }

    /// Sets the maximum number of operations in flight. Default: 65536.
    pub fn max_operations(mut self, operations: usize) -> Self {
        self.config.max_operations = operations;
        self
    }

    /// Sets the maximum number of payload bytes of unexpected messages from one peer. Further messages stay
    /// with the peer. Default: 16 MiB.
    pub fn max_unexpected_bytes(mut self, bytes: usize) -> Self {
        self.config.max_unexpected_bytes = bytes;
        self
    }

    /// Sets the maximum number of unexpected messages from one peer. Default: 16384.
    pub fn max_unexpected_messages(mut self, messages: usize) -> Self {
        self.config.max_unexpected_messages = messages;
        self
    }

    /// Sets the lookup of windows of peers: the size of its cache, and what it does on a miss. With
    /// this call every access is looked up. By default an access computes where the memory is, from
    /// where the window begins, and only memory for which that is not possible is looked up.
    pub fn lookup(mut self, lookup: memferry_memory::lookup::LookupConfig) -> Self {
        self.config.lookup = Some(lookup);
        self
    }

    /// Sets the timeout of a connect. Default: 10 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// The context by which messages are planned: measured costs, and the settings of this builder and of the
    /// environment.
    pub fn plan_context(&self) -> Result<MessagePlanContext, Error> {
        Ok(self.config()?.plan_context())
    }

    /// The configuration, with the environment for settings that are not set. The progress thread is on if
    /// either requests it, cross-memory access if neither forbids it.
    pub(crate) fn config(&self) -> Result<PortConfig, Error> {
        settings::check_variables();
        heap::adopt();
        if let Some(problem) = &self.error {
            return Err(problem.clone().into());
        }
        if MessageProfile::load().is_err() {
            return Err(ValidationError::Setting {
                name: "MEMFERRY_PROFILE",
                value: std::env::var("MEMFERRY_PROFILE").unwrap_or_default(),
                expected: "off, on, measure, or a file that can be read and written",
            }
            .into());
        }
        let mut settings = self.config.clone();
        let limits = &mut settings.limits;
        for (bytes, name) in [
            (&mut limits.eager_bytes, "MEMFERRY_EAGER_BYTES"),
            (&mut limits.cooperative_bytes, "MEMFERRY_COOPERATIVE_BYTES"),
            (&mut limits.offload_bytes, "MEMFERRY_OFFLOAD_BYTES"),
        ] {
            fill_from_variable(bytes, name, size::EXPECTED, |text| size::parse(text).ok())?;
        }
        let (name, expected) = ("MEMFERRY_MESSAGE_SPIN_NS", "a number of nanoseconds");
        fill_from_variable(&mut settings.spin_ns, name, expected, |text| text.parse().ok())?;
        if let Some(path @ (PathKind::Inline | PathKind::Eager)) = limits.path {
            let (name, value) = ("path", path.name().to_owned());
            let expected =
                "a path for messages that wait: single, cooperative, offload or pipeline";
            return Err(ValidationError::Setting { name, value, expected }.into());
        }
        if limits.path.is_none() {
            limits.path =
                parse_variable("MEMFERRY_PATH", "single, cooperative, offload or pipeline", |w| {
                    PathKind::from_name(w)
                        .filter(|path| !matches!(path, PathKind::Inline | PathKind::Eager))
                })?;
        }
        limits.pinning = match self.pinning {
            Some(pinning) => pinning,
            None => parse_variable("MEMFERRY_PINNING", "auto, off or on", Pinning::from_setting)?
                .unwrap_or_default(),
        };
        let switch = |name| parse_variable(name, switch::EXPECTED, switch::parse);
        let kernels = Streaming::EXPECTED;
        parse_variable(port::STREAMING_VARIABLE, kernels, port::streaming_from_setting)?;
        parse_variable(heap::PEERS_VARIABLE, heap::PEERS_EXPECTED, heap::all_from_setting)?;
        settings.background |= switch("MEMFERRY_BACKGROUND")?.unwrap_or(false);
        settings.cross_memory &= switch("MEMFERRY_CMA")?.unwrap_or(true);
        Ok(settings)
    }
}

fn parse_variable<T>(
    name: &'static str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, Error> {
    settings::read_variable(name, parse)
        .map_err(|value| ValidationError::Setting { name, value, expected }.into())
}

fn fill_from_variable<T>(
    field: &mut Option<T>,
    name: &'static str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<(), Error> {
    if field.is_none() {
        *field = parse_variable(name, expected, parse)?;
    }
    Ok(())
}
