//! Memferry moves memory inside a process and between the processes of one machine.
//!
//! | job | entry point | what it does |
//! |---|---|---|
//! | copies | [`Ferry`] | asynchronous copies in a process, by any engine of the machine |
//! | messages | [`message::Endpoint`], [`message::Job`], [`message::Link`] | single-copy messages between processes |
//! | collective operations | [`message::Job`] | barrier, broadcast, reduce, gather and all-to-all of processes |
//! | windows | [`message::Window`], [`message::RemoteWindow`] | one-sided put and get to exposed memory |
//! | loading | module `load`, with the feature `load` | files, safetensors in particular, to memory and GPUs |
//!
//! # Copies
//!
//! The caller starts a copy, computes, checks for completion, and uses the first elements while the
//! last ones are in flight. Spare processor cores, the copy engines of GPUs, Intel's DSA and I/OAT, and
//! network cards in loopback mode copy. The last three are tested with models and emulators only.
//!
//! ```
//! use memferry::Ferry;
//!
//! let ferry = Ferry::new()?;
//! let source = vec![1.5f32; 1 << 20];
//! let mut target = vec![0f32; 1 << 20];
//!
//! // Blocking: the calling thread makes small copies, several cores make large ones.
//! ferry.copy(&source, &mut target)?;
//!
//! // Asynchronous, with buffers that move in and come back.
//! let transfer = ferry.icopy(source, target)?;
//! // ... compute ...
//! let (source, mut target) = transfer.wait()?; // or: transfer.await
//!
//! // Asynchronous, with borrowed buffers, in a scope that ends after its copies.
//! ferry.scope(|scope| {
//!     let transfer = scope.icopy(&source, &mut target)?;
//!     assert_eq!(transfer.wait_range(..1)?, [1.5]);
//!     transfer.wait()
//! })?;
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! Slices and buffers are of any plain type ([`Pod`]): integers, floats, arrays of them, and
//! structures that derive `bytemuck::Pod`. Positions and lengths of typed slices count elements;
//! those of raw memory, of GPU memory and in errors count bytes. Elements of a zero-sized type have
//! no bytes: a copy of any number of them succeeds and does nothing.
//!
//! | memory | call | what keeps it alive |
//! |---|---|---|
//! | owned buffers | [`Ferry::icopy`] | the transfer, which returns them at completion |
//! | scoped borrows | [`Ferry::scope`] | the scope, which ends only after its copies are complete |
//! | raw pointers | [`Ferry::icopy_raw`], [`Ferry::start_raw`] | the caller (`unsafe`) |
//!
//! `wait`, `check`, `.await`, `event` for event loops, a [`Notification`] variable and a [`Cookie`] are
//! views of the same completion.
//!
//! [`Ferry::copy_crc`] and [`Ferry::crc`] return the CRC-32C of the data, [`Ferry::dualcast`] copies
//! one source to two targets:
//!
//! ```
//! use memferry::Ferry;
//!
//! let ferry = Ferry::new()?;
//! let (mut target, mut second) = ([0u8; 9], [0u8; 9]);
//! assert_eq!(ferry.copy_crc(b"123456789", &mut target)?, 0xE306_9283);
//! assert_eq!(ferry.crc(&target)?, 0xE306_9283);
//! ferry.dualcast(b"987654321", &mut target, &mut second)?;
//! assert_eq!(target, second);
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # Messages
//!
//! Endpoints exchange tagged messages with many peers; a link connects two processes without tags.
//! Small messages go through shared memory; large ones are copied once, by sender and receiver
//! together, where the system lets one process access the memory of the other.
//!
//! ```
//! use memferry::message::{Endpoint, Source, TAG_ALL};
//!
//! // Two endpoints; commonly they are in two processes.
//! let (here, there) = (Endpoint::open("front-here")?, Endpoint::open("front-there")?);
//! let receiver = std::thread::spawn(move || {
//!     let mut buffer = [0; 5];
//!     let received = there.recv(Source::Any, 7, TAG_ALL, &mut buffer)?;
//!     assert_eq!((received.length, &buffer), (5, b"hello"));
//!     Ok::<_, memferry::message::Error>(())
//! });
//! let peer = here.connect("front-there")?;
//! here.send(peer, 7, b"hello")?;
//! receiver.join().unwrap()?;
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! Messages make progress in calls of either side, or by a progress thread: see
//! [`message::Endpoint`].
//!
//! # Windows
//!
//! The owner exposes memory; peers put to it and get from it, and the owner calls nothing meanwhile.
//!
//! ```
//! use memferry::message::{Endpoint, Rights, ShareableBuffer};
//!
//! let owner = Endpoint::open("front-owner")?;
//! let window = owner.expose(ShareableBuffer::new(1 << 20)?, Rights::READ_WRITE)?;
//!
//! // The peer, commonly another process, gets the handle in a message.
//! let other = Endpoint::open("front-other")?;
//! let peer = other.connect("front-owner")?;
//! other.attach(peer, window.handle())?.put(4096, b"hello")?;
//! let mut data = [0; 5];
//! window.read(4096, &mut data);
//! assert_eq!(&data, b"hello");
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # Stability
//!
//! The items on this page are the stable interface. The feature `unstable` adds the inner crates
//! for the program `memferry`, for benches and for tests; they change without notice.

pub use memferry_copy::{
    BatchItem, Buffer, BuildError, CacheHint, Cookie, CookieError, CrcTransfer, Dependency, Error,
    FailedTransfer, Ferry, FerryBuilder, LearnedDelivery, LearnedShare, LearnedValues, Options,
    OwnedSlice, OwnedSource, OwnedTarget, OwnedTransfer, Pod, Region, RegistrationStatistics,
    Request, ScopedTransfer, Segment, Statistics, Transfer, TransferScope, ValidationError,
};

pub use memferry_copy::{
    DeviceAllocError, DeviceAllocator, DeviceBuffer, EngineSelection, Notification, PinLimits,
    TransferOutput,
};
pub use memferry_engine::cuda::CudaEngine;
pub use memferry_engine::{ChannelStatistics, ExecutionError, MemoryKind};
pub use memferry_memory::pin_cache::{InvalidationMode, PinCacheStatistics};
pub use memferry_memory::pinning::PinError;
pub use memferry_sys::EventFd;
pub use memferry_sys::copy::stream::Streaming;

/// The planner of copies: which engine executes a request, how, and why.
///
/// ```
/// use memferry::Ferry;
/// use memferry::plan::CopyQuery;
///
/// let plan = Ferry::new()?.explain(&CopyQuery::copy(4 << 20, true)).expect("a plan");
/// println!("{:?}: {}", plan.strategy, plan.reason);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub mod plan {
    #[cfg(feature = "unstable")]
    #[doc(hidden)]
    pub use memferry_copy::plan::*;
    pub use memferry_copy::plan::{
        CopyPlan, CopyPlanContext, CopyQuery, CopyReason, CopyStrategy, DirectionCosts,
        EngineSummary, plan,
    };
    pub use memferry_engine::contract::{
        GroupKernel, GroupKernels, RegistrationCosts, ReuseHint, TuningFact, TuningOrigin,
    };
}

/// Policies that distribute transfers over the channels of an engine.
///
/// ```
/// use memferry::Ferry;
/// use memferry::policy::PolicyKind;
///
/// let ferry = Ferry::builder().policy(PolicyKind::RoundRobin).build()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub mod policy {
    pub use memferry_copy::policy::PolicyKind;
}

/// Engines and their contract, for programs that choose an engine or implement one.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use memferry::Ferry;
/// use memferry::engine::nic::{NicConfig, NicEngine};
///
/// let card = Arc::new(NicEngine::open("0000:00:04.0", NicConfig::default())?);
/// let ferry = Ferry::builder().engine(card, 1).build()?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
pub mod engine {
    pub use memferry_engine::contract::{
        CopyDirection, MemoryKindSet, OpcodeSet, RegistrationMode,
    };
    #[cfg(feature = "unstable")]
    #[doc(hidden)]
    pub use memferry_engine::*;
    pub use memferry_engine::{
        Capabilities, Channel, ChannelOptions, ChannelStatistics, CostLine, Descriptor, Engine,
        ExecutionError, InterruptSleep, Kernel, MemoryKind, Opcode, OpenError, Sequence,
        SubmitError, Submitted,
    };

    /// The processor engine.
    pub mod cpu {
        pub use memferry_engine::cpu::{
            CpuEngine, CpuProfile, ProfileError, ProfileOrigin, ProfileSource, SiblingUse,
        };
    }

    /// The GPU engine.
    pub mod cuda {
        #[cfg(feature = "unstable")]
        #[doc(hidden)]
        pub use memferry_engine::cuda::*;
        pub use memferry_engine::cuda::{CudaDeviceInfo, CudaEngine, CudaProfile};
    }

    /// The engine of Intel's data streaming accelerator.
    pub mod dsa {
        #[cfg(feature = "unstable")]
        #[doc(hidden)]
        pub use memferry_engine::dsa::*;
        pub use memferry_engine::dsa::{DsaCounters, DsaEngine};
    }

    /// The engine of Intel's I/OAT.
    pub mod ioat {
        pub use memferry_engine::ioat::IoatEngine;
        #[cfg(feature = "unstable")]
        #[doc(hidden)]
        pub use memferry_engine::ioat::*;
    }

    /// The engine of a network card in loopback mode.
    pub mod nic {
        #[cfg(feature = "unstable")]
        #[doc(hidden)]
        pub use memferry_engine::nic::*;
        pub use memferry_engine::nic::{NicConfig, NicCounters, NicEngine};
    }

    /// Models of devices, the suite that every engine passes, and engines for tests.
    #[cfg(feature = "testing")]
    pub mod testing {
        pub use memferry_engine::testing::*;
    }

    /// PCI devices that are bound to vfio-pci.
    pub mod pci {
        pub use memferry_engine::pci::available_devices;
        #[cfg(feature = "unstable")]
        #[doc(hidden)]
        pub use memferry_engine::pci::*;
    }
}

/// Messages between processes: endpoints, links, jobs, windows and shareable memory.
///
/// The front page of this crate has an example; [`Endpoint`](message::Endpoint) explains progress.
pub mod message {
    pub use memferry_message::plan::{PathKind, Pinning};
    pub use memferry_message::window::{HandleError, WindowBusy};
    #[cfg(feature = "unstable")]
    #[doc(hidden)]
    pub use memferry_message::*;
    pub use memferry_message::{
        CollectiveError, ConnectError, CrossMemoryDenied, Disconnect, DisconnectReason, Element,
        ElementType, Endpoint, EndpointBuilder, Error, FailedOperation, IntoSegments,
        IntoSegmentsMut, Job, Link, Listener, MAX_SEGMENTS, MemorySide, MessageStatus, Operation,
        OperationName, OperationScope, OwnedOperation, Peer, PeerAccess, PeerName, PutNotification,
        RawMemory, ReadyFd, ReduceOp, Reduction, RemoteWindow, Rights, ScopedOperation, Segment,
        ShareableBuffer, Source, SystemError, TAG_ALL, TAG_ANY, ValidationError, Window,
        WindowHandle,
    };
}

/// Loading of files to memory and to GPUs (feature `load`).
#[cfg(feature = "load")]
pub mod load {
    pub use memferry_load::{
        DeviceTensors, Dtype, FileSource, LoadError, LoadReport, Loader, LoaderBuilder, Loading,
        Placement, ReadMode, SafetensorsFile, ShardedFiles, Tensor,
    };
}

/// Pin caches, registration and address translation.
#[cfg(feature = "unstable")]
#[doc(hidden)]
pub mod memory {
    pub use memferry_memory::*;
}

/// Information about the machine, and system interfaces.
#[cfg(feature = "unstable")]
#[doc(hidden)]
pub mod sys {
    pub use memferry_sys::copy::stream::Streaming;
    pub use memferry_sys::{affinity, clock, copy, cpu, pages};
}

/// The examples of the README and of the guide, compiled and run as tests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../README.md")]
    pub struct Readme;
    #[doc = include_str!("../../../docs/guide/copies.md")]
    pub struct Copies;
    #[doc = include_str!("../../../docs/guide/messages.md")]
    pub struct Messages;
    #[doc = include_str!("../../../docs/guide/windows.md")]
    pub struct Windows;
    #[doc = include_str!("../../../docs/guide/gpus.md")]
    pub struct Gpus;
    #[doc = include_str!("../../../docs/guide/devices.md")]
    pub struct Devices;
}
