//! A descriptor that has ended, until that is reported.

use crate::contract::{Descriptor, ExecutionError};
use crate::pci::hardware::HwStatus;

/// A descriptor that has left the queue.
#[derive(Debug)]
pub(super) struct FinishedDescriptor {
    pub(super) descriptor: Descriptor,
    pub(super) end: FinalStatus,
}

/// The final status of a descriptor.
#[derive(Debug, Clone, Copy)]
pub(super) enum FinalStatus {
    Hardware(HwStatus),
    Cancelled,
    /// Not started: what its transfer is ordered after has failed.
    Unstarted,
}

impl FinalStatus {
    pub(super) fn has_failed(self) -> bool {
        matches!(
            self,
            Self::Hardware(HwStatus::Failed(_) | HwStatus::BadMemory { .. })
                | Self::Cancelled
                | Self::Unstarted
        )
    }
}

impl FinishedDescriptor {
    /// Reports the end; returns the error of a failed descriptor.
    pub(super) fn finish(self) -> Result<(), ExecutionError> {
        // The device was given it with what it is ordered after, and has not executed it.
        let is_unstarted = self.end.has_failed() && self.descriptor.has_failed_predecessor();
        let error = match self.end {
            _ if is_unstarted => ExecutionError::Predecessor,
            FinalStatus::Unstarted => ExecutionError::Predecessor,
            FinalStatus::Hardware(HwStatus::Ok) => {
                self.descriptor.finish(Ok(None));
                return Ok(());
            }
            FinalStatus::Hardware(HwStatus::OkNotified) => {
                self.descriptor.finish_notified();
                return Ok(());
            }
            FinalStatus::Hardware(HwStatus::OkValue(value)) => {
                self.descriptor.finish(Ok(Some(value)));
                return Ok(());
            }
            FinalStatus::Hardware(HwStatus::BadMemory { address, done_bytes }) => {
                ExecutionError::BadMemory { address, done_bytes }
            }
            FinalStatus::Cancelled => ExecutionError::Cancelled { done_bytes: 0 },
            FinalStatus::Hardware(HwStatus::Failed(reason)) => {
                ExecutionError::Engine { done_bytes: 0, reason }
            }
        };
        self.descriptor.finish(Err(error.clone()));
        Err(error)
    }
}
