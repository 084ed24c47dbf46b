//! Settings of endpoints and links: from the caller, then from the environment, then from
//! measurement.

use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, ValidationError};
use crate::plan::{Facts, PathKind, Pinning, Profile};
use crate::port::Settings;

/// Settings for a new endpoint, listener or link. What is not set here is taken from the
/// environment, and what is not set there is measured.
#[derive(Debug, Clone, Default)]
#[must_use = "nothing happens before it is opened"]
pub struct Builder {
    settings: Settings,
    /// What is set of it, if it is.
    pinning: Option<Pinning>,
    problem: Option<ValidationError>,
}

impl Builder {
    /// The variables of the environment that are looked at.
    pub const VARIABLES: [&'static str; 9] = [
        "MEMFERRY_BACKGROUND",
        "MEMFERRY_CMA",
        "MEMFERRY_EAGER_BYTES",
        "MEMFERRY_COOPERATIVE_BYTES",
        "MEMFERRY_OFFLOAD_BYTES",
        "MEMFERRY_PATH",
        "MEMFERRY_PINNING",
        "MEMFERRY_MESSAGE_SPIN_NS",
        crate::window::windows::TRACE_VARIABLE,
    ];

    /// Nothing set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves messages in a thread of their own, so that they arrive while the application computes
    /// and calls nothing (`MEMFERRY_BACKGROUND=on`).
    pub fn background(mut self, background: bool) -> Self {
        self.settings.background = background;
        self
    }

    /// Lets a further user connect, and connects to that user's processes. Usual: this process's
    /// user alone.
    pub fn allow_uid(mut self, uid: u32) -> Self {
        self.settings.allowed.uids.push(uid);
        self
    }

    /// As [`Builder::allow_uid`], by the user's name.
    pub fn allow_user(mut self, name: &str) -> Self {
        match memferry_sys::user::uid_of(name) {
            Some(uid) => self.allow_uid(uid),
            None => {
                self.problem = Some(ValidationError::Setting {
                    name: "allow_user",
                    value: name.to_owned(),
                    expected: "the name of a user of this machine",
                });
                self
            }
        }
    }

    /// Whether the memory of peers is read and written directly where the system permits it
    /// (`MEMFERRY_CMA=off` forbids it). Usual: yes.
    pub fn cross_memory(mut self, use_it: bool) -> Self {
        self.settings.cross_memory = use_it;
        self
    }

    /// Messages up to this size, at most 128 KiB, are sent at once, without asking the receiver
    /// (`MEMFERRY_EAGER_BYTES`).
    pub fn eager_bytes(mut self, bytes: u64) -> Self {
        self.settings.limits.eager_bytes = Some(bytes);
        self
    }

    /// Messages from this size on are copied by both sides (`MEMFERRY_COOPERATIVE_BYTES`).
    pub fn cooperative_bytes(mut self, bytes: u64) -> Self {
        self.settings.limits.cooperative_bytes = Some(bytes);
        self
    }

    /// Messages in shareable memory from this size on are copied by engines
    /// (`MEMFERRY_OFFLOAD_BYTES`).
    pub fn offload_bytes(mut self, bytes: u64) -> Self {
        self.settings.limits.offload_bytes = Some(bytes);
        self
    }

    /// Messages that are not sent at once take this path, where it is possible
    /// (`MEMFERRY_PATH`: `single`, `cooperative`, `offload` or `pipeline`).
    pub fn path(mut self, path: PathKind) -> Self {
        self.settings.limits.path = Some(path);
        self
    }

    /// Whether memory that is not there (never touched, discarded, swapped out) is brought in just
    /// before it is copied (`MEMFERRY_PINNING`: `auto`, `off` or `on`). Usual: `auto`, which looks
    /// whether it is there.
    pub fn pinning(mut self, pinning: Pinning) -> Self {
        self.pinning = Some(pinning);
        self
    }

    /// How long a waiting thread looks before it sleeps (`MEMFERRY_MESSAGE_SPIN_NS`). Usual: a
    /// while; where processes share cores, others run between any two looks.
    pub fn spin_ns(mut self, spin_ns: u64) -> Self {
        self.settings.spin_ns = Some(spin_ns);
        self
    }

    /// The most peers at a time. Usual: 1024.
    pub fn most_peers(mut self, peers: usize) -> Self {
        self.settings.most_peers = peers;
        self
    }

    /// The most operations under way at a time. Usual: 65536.
    pub fn most_operations(mut self, operations: usize) -> Self {
        self.settings.most_operations = operations;
        self
    }

    /// The most payload bytes of messages from one peer that are kept until somebody receives
    /// them; beyond that, they stay with the peer. Usual: 16 MiB.
    pub fn most_kept_bytes(mut self, bytes: usize) -> Self {
        self.settings.most_kept_bytes = bytes;
        self
    }

    /// The most messages from one peer that are kept until somebody receives them. Usual: 16384.
    pub fn most_kept_messages(mut self, messages: usize) -> Self {
        self.settings.most_kept = messages;
        self
    }

    /// How windows of peers are looked up: the size of the cache, what becomes of accesses that miss.
    pub fn lookup(mut self, lookup: memferry_memory::lookup::Settings) -> Self {
        self.settings.lookup = lookup;
        self
    }

    /// How long connecting may take. Usual: 10 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.settings.connect_timeout = timeout;
        self
    }

    /// What messages will be planned by: measured costs, and what was set here or in the
    /// environment.
    pub fn facts(&self) -> Result<Facts, Error> {
        Ok(self.settings()?.facts())
    }

    /// The settings, with the environment in the places that were left open. Background progress is
    /// on if either asks for it, cross-memory access if neither forbids it.
    pub(crate) fn settings(&self) -> Result<Settings, Error> {
        if let Some(problem) = &self.problem {
            return Err(problem.clone().into());
        }
        if Profile::load().is_err() {
            return Err(ValidationError::Setting {
                name: "MEMFERRY_PROFILE",
                value: std::env::var("MEMFERRY_PROFILE").unwrap_or_default(),
                expected: "off, measure, or a file that can be read and written",
            }
            .into());
        }
        let mut settings = self.settings.clone();
        let limits = &mut settings.limits;
        fill(&mut limits.eager_bytes, "MEMFERRY_EAGER_BYTES")?;
        fill(&mut limits.cooperative_bytes, "MEMFERRY_COOPERATIVE_BYTES")?;
        fill(&mut limits.offload_bytes, "MEMFERRY_OFFLOAD_BYTES")?;
        fill(&mut settings.spin_ns, "MEMFERRY_MESSAGE_SPIN_NS")?;
        if let Some(path @ (PathKind::Inline | PathKind::Eager)) = limits.path {
            let (name, value) = ("path", path.name().to_owned());
            let expected =
                "a path for messages that wait: single, cooperative, offload or pipeline";
            return Err(ValidationError::Setting { name, value, expected }.into());
        }
        if limits.path.is_none() {
            limits.path = word("MEMFERRY_PATH", "single, cooperative, offload or pipeline", |w| {
                PathKind::from_name(w)
                    .filter(|path| !matches!(path, PathKind::Inline | PathKind::Eager))
            })?;
        }
        limits.pinning = match self.pinning {
            Some(pinning) => pinning,
            None => {
                word("MEMFERRY_PINNING", "auto, off or on", Pinning::from_name)?.unwrap_or_default()
            }
        };
        let switch = |word: &str| match word {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        };
        settings.background |= word("MEMFERRY_BACKGROUND", "on or off", switch)?.unwrap_or(false);
        settings.cross_memory &= word("MEMFERRY_CMA", "on or off", switch)?.unwrap_or(true);
        Ok(settings)
    }
}

fn word<T>(
    name: &'static str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, Error> {
    let Some(value) = std::env::var_os(name) else { return Ok(None) };
    let value = value.to_string_lossy().into_owned();
    match parse(&value) {
        Some(parsed) => Ok(Some(parsed)),
        None => Err(ValidationError::Setting { name, value, expected }.into()),
    }
}

fn fill<T: FromStr>(place: &mut Option<T>, name: &'static str) -> Result<(), Error> {
    if place.is_none() {
        *place = word(name, "a whole number", |word| word.parse().ok())?;
    }
    Ok(())
}
