//! Engines of devices, with models of the devices behind them.

use std::sync::Arc;

use memferry_engine::dsa::DsaEngine;
use memferry_engine::ioat::IoatEngine;
use memferry_engine::nic::{self, NicEngine};
use memferry_engine::testing::dsa_model::DsaModel;
use memferry_engine::testing::ioat_model::IoatModel;
use memferry_engine::testing::nic_model::NicModel;

/// Intel's copy engine with this many channels.
pub(crate) fn ioat(channels: usize) -> (Arc<IoatModel>, Arc<IoatEngine>) {
    let model = IoatModel::builder().channels(channels).build();
    let engine = IoatEngine::over_model(model.clone()).unwrap();
    (model, Arc::new(engine))
}

/// Intel's data streaming accelerator with one queue.
#[allow(dead_code, reason = "not every test file uses it")]
pub(crate) fn dsa() -> (Arc<DsaModel>, Arc<DsaEngine>) {
    let model = DsaModel::new();
    let engine = DsaEngine::over_model(model.clone()).unwrap();
    (model, Arc::new(engine))
}

/// A network card.
pub(crate) fn card() -> (Arc<NicModel>, Arc<NicEngine>) {
    let model = NicModel::new();
    let engine = NicEngine::over_model(model.clone(), nic::NicConfig::default()).unwrap();
    (model, Arc::new(engine))
}
