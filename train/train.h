#pragma once
// A training loop for those who want one:
//
//   train(net, loader, {.epochs = 10, .validation = test_loader, .autocast = DType::f16, .folder = "run"});
//
// with a progress bar, validation, early stopping, gradient accumulation, mixed precision, and checkpoints from which it goes on
// as if it had never stopped. It is the plain loop and nothing beside it; whoever needs another writes that one.
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "halftone/nn/module.h"
#include "halftone/optim/average.h"
#include "halftone/optim/schedule.h"
#include "halftone/train/batches.h"

namespace halftone {

// What an epoch came to. Validation figures are NaN where there is no validation.
struct TrainEpoch {
  int64_t epoch = 0;             // from 1
  double loss = 0;               // the mean over its examples
  double validation_loss = std::numeric_limits<double>::quiet_NaN();
  double accuracy = std::numeric_limits<double>::quiet_NaN();  // share of validation examples whose largest output is at the target; NaN
                                                               // unless outputs are [n, classes] and targets [n], whole numbers
  double seconds = 0;            // with its validation
};

struct TrainOptions {
  int64_t epochs = 1;
  // A batch's mean loss from output and target; none: cross_entropy.
  std::function<Tensor(const Tensor& y, const Tensor& target)> loss = {};
  optim::Optimizer* optimizer = nullptr;      // none: AdamW with its defaults
  optim::Schedule* schedule = nullptr;        // of that optimizer; goes into checkpoints
  optim::EMA* ema = nullptr;                  // of that optimizer; validation sees its averages
  std::optional<Batches> validation = {};     // a loader, run after each epoch
  std::optional<DType> autocast = {};         // f16 or bf16: mixed precision; f16 scales the loss
  int64_t accumulate = 1;                     // batches whose gradients make one step; an epoch's last step may have fewer
  double clip_norm = 0;                       // of all gradients together; 0: none
  int64_t patience = 0;                       // end after so many epochs in a row whose validation loss is no new best; 0: never
  std::string folder = {};                    // for checkpoints and epochs.csv; empty: neither
  bool resume = true;                         // go on from the folder's newest checkpoint
  bool restore_best = false;                  // end with the weights of the best epoch; needs a folder and validation
  bool capture = false;                       // replay steps as device graphs
  bool progress = true;
  std::function<bool(const TrainEpoch&)> after_epoch = {};  // false ends the training; runs before the checkpoint is saved
};

struct TrainResult {
  std::vector<TrainEpoch> epochs;   // of all runs that led here
  int64_t best_epoch = 0;           // by validation loss; 0: there was none
  int64_t skipped_steps = 0;        // by the scaler, in all
  double final_scale = 1;
  bool stopped_early = false;       // by patience or after_epoch
  bool interrupted = false;         // by Ctrl-C or SIGTERM, with a checkpoint in the folder
};

// Trains net with the loader's batches, whose device must be the parameters'. Ctrl-C ends it after the current step, with a
// checkpoint where there is a folder; called again it goes on from there, bit for bit. The net is left in train mode. Throws Error,
// naming the option, when one makes no sense, or when the loss of an epoch is not finite.
HT_API TrainResult train(nn::Module& net, Batches loader, const TrainOptions& options = {});

}  // namespace halftone
